"""A step: who takes part with how many tokens (`Plan`), and what came of it (`Drawn`). R sequences of the step."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from serve.request import Logprobs
from serve.schedule.sequence import Sequence
from serve.schedule.table import Table


@dataclass(frozen=True)
class Prefill:
    """Tokens [start, start + count) of a sequence that is catching up; the last stretch draws its first token.
    ``told``: prompt positions before it whose log-probabilities went out already."""

    sequence: Sequence
    start: int
    count: int
    last: bool
    told: int = 0


@dataclass(frozen=True)
class Copy:
    """Window rings, tails and last tokens of one slot to another."""

    source: int
    target: int


class Parted(NamedTuple):
    """A sequence whose prefill is done, ``tokens`` of it in ``pages``, and that goes on at another engine."""

    sequence: Sequence
    pages: np.ndarray
    slot: int
    tokens: int


@dataclass(eq=False)
class Plan:
    """Sequences that decode come first, then those that prefill. ``drafts`` is the most a decoding one may verify.

    Positions of decoding sequences are read from ``table`` when the step is launched: a plan may be made while the
    step before it still runs.
    """

    table: Table
    decode: np.ndarray  # [R - len(prefills)] slots
    drafts: int
    prefills: list[Prefill] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)  # in this order, before the step

    def __post_init__(self):
        waiting = [p.sequence.slot for p in self.prefills]  # in order
        self.slots = np.concatenate((self.decode, np.array(waiting, np.int64))) if waiting else self.decode
        self.handles = self.table.handle[self.slots]
        self.epochs = self.table.epoch[self.slots]
        self.moves = self.table.moves

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def tokens(self) -> int:
        """Most rows the step can have."""
        return len(self.decode) * (1 + self.drafts) + sum(p.count for p in self.prefills)

    @property
    def whole(self) -> bool:
        """Whether nobody came or went since it was made. If False, it may still be as good as new."""
        return self.table.moves == self.moves

    def live(self) -> np.ndarray:
        """[R] bool: which of its sequences are still there, as they were when the plan was made."""
        return (self.table.handle[self.slots] == self.handles) & (self.table.epoch[self.slots] == self.epochs)

    def without_ended(self) -> "Plan":
        """The plan without sequences that ended since it was made."""
        if self.whole or (live := self.live()).all():
            return self
        n = len(self.decode)
        prefills = [p for p, alive in zip(self.prefills, live[n:], strict=True) if alive]
        return Plan(self.table, self.decode[live[:n]], self.drafts, prefills)


@dataclass(eq=False)
class Drawn:
    """What a step drew, in the order of the plan. ``counts`` 0: a stretch of prefill that is not the last."""

    tokens: np.ndarray  # [R, K] int64
    counts: np.ndarray  # [R] int64: accepted drafts and one more
    drafted: int = 0  # drafts verified in the step
    accepted: int = 0
    logprobs: dict[int, Logprobs] = field(default_factory=dict)  # handle ->
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    device_s: float = 0.0

    @staticmethod
    def empty() -> "Drawn":
        """Of a step whose sequences all ended before it was launched."""
        return Drawn(np.zeros((0, 1), np.int64), np.zeros(0, np.int64))
