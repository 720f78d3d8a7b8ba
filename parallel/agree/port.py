"""Step agreement: every rank brings a row of integers, all get the rows of all. n ranks, rows of W int64.

A port has ``gather(row) -> rows [n, W]``, equal on all ranks, and blocks until all have called it; then
``transport_s`` and ``skew_s`` tell the two parts of that call apart. What the columns mean is the caller's business.
Backends: `Alone` (n = 1), `gloo.Gloo` (torch.distributed, across nodes), `node.Recursive` (shared memory, on a node).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np


class Agree(Protocol):
    rank: int
    size: int
    bell: int | None  # readable where `called` turns true after it was false; None: nothing tells

    def gather(self, row: Sequence[int]) -> np.ndarray: ...  # [n, W] int64, the caller's own

    def called(self) -> bool: ...  # whether a rank waits for us in the next gather; True where that cannot be seen

    @property
    def transport_s(self) -> float: ...  # of the last gather: from the last rank's arrival to its return here

    @property
    def skew_s(self) -> float: ...  # of the last gather: from our arrival to the last rank's

    def close(self) -> None: ...


class Missing(TimeoutError):
    """Ranks that did not do their part of a step. ``why`` says of each what is known: dead, not arrived, ..."""

    def __init__(self, rank: int, step: int, waited_s: float, why: Mapping[int, str]):
        self.ranks, self.why = tuple(sorted(why)), dict(why)
        named = ", ".join(f"rank {r} {why[r]}" for r in self.ranks) or "unknown which"
        super().__init__(f"agree: step {step} of rank {rank} ended after {waited_s:.3g} s: missing {named}")


class OutOfStep(RuntimeError):
    """Ranks whose rows are of another step, or not what they wrote: no result can be trusted any more."""


class Alone:
    """One rank agrees with itself."""

    rank, size, bell = 0, 1, None
    transport_s = skew_s = 0.0

    def __init__(self, width: int):
        self.width = width

    def gather(self, row: Sequence[int]) -> np.ndarray:
        if len(row) != self.width:
            raise ValueError(f"agree: a row has {self.width} words here, got {len(row)}")
        return np.array([row], np.int64)

    def called(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Arrivals:
    """``transport_s`` and ``skew_s`` from the times of arrival that came with the rows, in ns of one host's clock."""

    def __init__(self, now: Callable[[], float]):
        self.now, self.one_clock = now, True
        self.mine = self.done = 0
        self.times = np.zeros(1, np.int64)

    def arrive(self) -> int:
        self.mine = int(self.now() * 1e9)
        return self.mine

    def leave(self, times: np.ndarray) -> None:
        self.done, self.times = int(self.now() * 1e9), times

    @property
    def transport_s(self) -> float:
        """Without one clock nobody knows when the last rank arrived: then the whole call."""
        return (self.done - (int(self.times.max()) if self.one_clock else self.mine)) / 1e9

    @property
    def skew_s(self) -> float:
        return (int(self.times.max()) - self.mine) / 1e9 if self.one_clock else 0.0
