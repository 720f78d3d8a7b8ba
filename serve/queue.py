"""The waiting line: who is next by a policy, with a bound on how long anyone waits."""

from collections.abc import Callable
from heapq import heappop, heappush

from serve.sequence import Sequence

SCAN = 64  # sequences, the oldest, that a policy whose keys change looks at


class Queue:
    """``key(sequence)`` orders; smaller goes first, equals by arrival. With ``rekey`` keys are asked anew each time.

    One that has waited ``max_wait`` steps goes before all others, and nobody passes it until there is room for it: no
    sequence waits for ever, whatever the policy.
    """

    def __init__(self, key: Callable[[Sequence], tuple], rekey: bool, max_wait: int):
        self._key, self._rekey, self._max_wait = key, rekey, max_wait
        self._waiting: dict[int, Sequence] = {}  # by handle, in order of joining
        self._heap: list[tuple[tuple, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self):
        return iter(self._waiting.values())

    def get(self, handle: int) -> Sequence | None:
        return self._waiting.get(handle)

    def push(self, sequence: Sequence, first: bool = False) -> None:
        """Join the line; ``first`` among those that wait too long, for one that was preempted."""
        if first:
            self._waiting = {sequence.handle: sequence, **self._waiting}
        else:
            self._waiting[sequence.handle] = sequence
        if not self._rekey:
            heappush(self._heap, (self._key(sequence), sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take it off the line; its entry in the heap is skipped later."""
        del self._waiting[sequence.handle]

    def head(self, step: int) -> Sequence | None:
        """Who goes next, still in line."""
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values()))
        if step - oldest.since >= self._max_wait:
            return oldest
        if self._rekey:
            near = [s for s, _ in zip(self._waiting.values(), range(SCAN), strict=False)]
            return min(near, key=lambda s: (self._key(s), s.order))
        while self._waiting.get(self._heap[0][2].handle) is not self._heap[0][2]:
            heappop(self._heap)
        return self._heap[0][2]
