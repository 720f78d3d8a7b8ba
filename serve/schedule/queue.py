"""The waiting line: who is next by a policy, with a bound on how long anyone waits."""

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import islice

from serve.schedule.sequence import Sequence

SCAN = 32  # sequences, the oldest, that a policy whose keys change looks at


class Queue:
    """``key(sequence)`` orders; smaller goes first, equals by arrival. With ``rekey`` keys are asked anew each time.

    One that has waited ``max_wait`` steps goes before all others, and nobody passes it until there is room for it: no
    sequence waits for ever, whatever the policy.
    """

    def __init__(self, key: Callable[[Sequence], tuple], rekey: bool, max_wait: int):
        self._key, self._rekey, self._max_wait = key, rekey, max_wait
        self._waiting: dict[int, tuple[tuple, Sequence]] = {}  # by handle, with the key it came with
        self._line: list[tuple[int, Sequence]] = []  # by arrival, one that was preempted where it was before
        self._ranked: list[tuple[tuple, int, Sequence]] = []  # by key; empty with rekey

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, handle: int) -> Sequence | None:
        return self._waiting[handle][1] if handle in self._waiting else None

    def push(self, sequence: Sequence) -> None:
        """Join the line."""
        key = () if self._rekey else self._key(sequence)
        self._waiting[sequence.handle] = (key, sequence)
        insort(self._line, (sequence.order, sequence))
        if not self._rekey:
            insort(self._ranked, (key, sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        key, _ = self._waiting.pop(sequence.handle)
        del self._line[bisect_left(self._line, (sequence.order,))]
        if not self._rekey:
            del self._ranked[bisect_left(self._ranked, (key, sequence.order))]

    def head(self, step: int) -> Sequence | None:
        """Who goes next, still in line."""
        if not self._line:
            return None
        oldest = self._line[0][1]
        if step - oldest.since >= self._max_wait:
            return oldest
        if self._rekey:
            return min(islice(self._line, SCAN), key=lambda one: (self._key(one[1]), one[0]))[1]
        return self._ranked[0][2]
