"""The waiting line against sorting it anew each time."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import Ask, Sampling
from serve.schedule.queue import SCAN, Queue
from serve.schedule.sequence import Sequence

MAX_WAIT = 20


def sequence(order: int, priority: int = 0, since: int = 0) -> Sequence:
    return Sequence(Ask(order, np.zeros(1, np.int32), [], Sampling(1), priority), order, since)


def key(s: Sequence) -> tuple:
    return (s.ask.priority,)


@settings(max_examples=200)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from("ppghr"), st.integers(0, 9)), max_size=80))
def test_the_line_is_what_sorting_gives(rekey, moves):
    """p: push, g: the head goes, h: it comes back (preempted), r: someone is removed."""
    queue, waiting, gone = Queue(key, rekey, MAX_WAIT), [], []
    for step, (kind, number) in enumerate(moves):
        if kind == "p":
            waiting.append(sequence(1 + step, number, step))
            queue.push(waiting[-1])
        elif kind == "h" and gone:
            waiting.append(gone.pop(number % len(gone)))
            queue.push(waiting[-1])
        elif kind == "r" and waiting:
            queue.remove(waiting.pop(number % len(waiting)))
        want = None
        if waiting:
            oldest = min(waiting, key=lambda s: s.order)
            late = step - oldest.since >= MAX_WAIT
            near = sorted(waiting, key=lambda s: s.order)[:SCAN] if rekey else waiting
            want = oldest if late else min(near, key=lambda s: (s.ask.priority, s.order))
        assert queue.head(step) is want and len(queue) == len(waiting)
        assert all(queue.get(s.handle) is s for s in waiting) and not any(queue.get(s.handle) for s in gone)
        if kind == "g" and want:
            queue.remove(want)
            waiting.remove(want)
            gone.append(want)
    for left in list(waiting):
        queue.remove(left)
    assert not queue._line and not queue._ranked, "what has left is still remembered"


def test_one_that_was_preempted_does_not_hide_one_that_waits_too_long():
    queue, old, young = Queue(key, False, MAX_WAIT), sequence(1, priority=9), sequence(2, priority=0, since=15)
    queue.push(old)
    queue.push(young)
    queue.remove(young)
    queue.push(young)
    assert queue.head(MAX_WAIT - 1) is young and queue.head(MAX_WAIT) is old
