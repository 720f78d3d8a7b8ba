"""What a trace holds, whatever its format: arrivals that stand alone, or sessions whose turns share their beginning.

A block is a fixed stretch of prompt tokens; its id stands for it *and everything before it*, so two prompts share
exactly the longest run of leading ids that they have in common. Ids are kept as runs [k, 2] (start, length).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Turn:
    """One request. ``start_s`` counts from the session's start, in a subagent from that subagent's."""

    start_s: float
    input_tokens: int
    output_tokens: int
    runs: np.ndarray  # [k, 2] int64
    call_s: float | None = None  # the recorded call, from request to last token
    think_s: float | None = None  # from the end of the stream's previous call to this request

    @property
    def end_s(self) -> float:
        return self.start_s + (self.call_s or 0.0)

    @property
    def ids(self) -> np.ndarray:
        """Block ids [n] int64."""
        return expand(self.runs)


@dataclass(frozen=True, eq=False)
class Subagent:
    """A conversation that a turn's tools began. Its parent's next turn waits for it unless it is ``background``."""

    start_s: float
    name: str
    background: bool
    head_tokens: int  # tools and system prompt in front of its first user turn
    events: tuple["Turn | Subagent", ...]


@dataclass(frozen=True, eq=False)
class Session:
    """A conversation with its subagents: a tree. Ids mean nothing outside of it."""

    name: str
    block_size: int
    head_tokens: int
    events: tuple[Turn | Subagent, ...]

    @property
    def duration_s(self) -> float:
        """Start of the last event of the root."""
        return max((e.start_s for e in self.events), default=0.0)


@dataclass(frozen=True, eq=False)
class Arrival:
    """A request of a flat trace. ``runs`` of ids that are global to the trace; None where the trace has none."""

    at_s: float
    input_tokens: int
    output_tokens: int
    runs: np.ndarray | None = None
    block_size: int = 64


def runs_of(ids: np.ndarray) -> np.ndarray:
    """Ids [n] as runs [k, 2] of consecutive ones."""
    ids = np.asarray(ids, np.int64)
    if not len(ids):
        return np.zeros((0, 2), np.int64)
    begins = np.flatnonzero(np.concatenate(([True], np.diff(ids) != 1)))
    return np.stack([ids[begins], np.diff(np.append(begins, len(ids)))], axis=1)


def expand(runs: np.ndarray) -> np.ndarray:
    """Runs [k, 2] as ids [n] int64."""
    starts, lengths = runs[:, 0], runs[:, 1]
    offsets = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - offsets, lengths)


def turns(events: Iterable[Turn | Subagent]) -> Iterator[Turn]:
    """Every turn in document order, those of subagents where their marker stands."""
    for event in events:
        if isinstance(event, Subagent):
            yield from turns(event.events)
        else:
            yield event


def subagents(events: Iterable[Turn | Subagent]) -> Iterator[Subagent]:
    """Every subagent in document order, nested ones after the one that began them."""
    for event in events:
        if isinstance(event, Subagent):
            yield event
            yield from subagents(event.events)


def hits(requests: Iterable[Turn | Arrival]) -> tuple[int, int]:
    """Blocks found, and blocks asked for, with a cache that never ends: a prompt's hit is its longest run of leading
    ids that came before it."""
    seen = np.zeros(1024, bool)
    found = total = 0
    for request in requests:
        if request.runs is None or not len(request.runs):
            continue
        ids = expand(request.runs)
        if ids.max() >= len(seen):
            seen = np.concatenate([seen, np.zeros(max(len(seen), int(ids.max()) + 1), bool)])
        known = seen[ids]
        found += len(ids) if known.all() else int(known.argmin())
        total += len(ids)
        seen[ids] = True
    return found, total
