"""Live migration of experts: a round plans in the background, moves layer by layer, and swaps each between two steps.

A round runs on a thread of each rank: show loads, rank 0 plans, then for each layer copy what this rank lacks into one
layer of staging and check it. The step's thread only tells how far this rank is (`row`, which travels with the ranks'
step agreement) and, when all ranks have a layer staged, copies it over and changes the placement, on all ranks between
the same two steps (`agreed`). So no layer is overwritten that anybody still reads, and no step sees half a change. A
round that fails on any rank, or makes no progress for a time, is abandoned by all ranks together; layers swapped by
then stay, the rest is as it was. L layers, E experts, P slots, S of them on this rank.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from parallel import expert
from parallel.eplb import metric, policy
from parallel.eplb.policy import Slots
from parallel.eplb.settings import Eplb
from parallel.eplb.window import ROWS, Window, recent
from parallel.expert import Placement
from parallel.movers import Cancelled, Move, Mover, moves

REST_S = 0.02  # between looks of a waiting thread at its link
CHUNK = 1 << 20  # 64-bit words summed at a time
COLUMNS = 3  # of a row: steps of the round done here, failed, idle
WIDTH = 2 * COLUMNS  # of the target's and the drafter's rows


@dataclass(frozen=True)
class Experts:
    """What this rank holds of the target's or the drafter's experts.

    ``tensors`` [L][..] of [S, ..]: all that an expert has, weights and scales; ``places`` and ``load`` (counters [L, P]
    of this rank's rows) are the model's own.
    """

    tensors: Sequence[Sequence[Tensor]]
    places: Sequence[Placement]
    load: Tensor
    slots: Slots

    def rows(self) -> list[list[Tensor]]:
        """Bytes [S, n] of each tensor."""
        return [[as_bytes(t) for t in layer] for layer in self.tensors]


def as_bytes(t: Tensor) -> Tensor:
    """A tensor [S, ..] as its bytes [S, n], the same memory."""
    assert t.is_contiguous()
    return t.detach().view(torch.uint8).view(t.shape[0], -1)


def staging(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Memory for one layer."""
    return [torch.empty_like(t) for t in rows[0]]


def checksum(parts: Sequence[Tensor]) -> int:
    """Of an expert's bytes; places count."""
    total = 0
    for i, part in enumerate(parts):
        words = (torch.nn.functional.pad(part, (0, -len(part) % 8)) if len(part) % 8 else part).view(torch.int64)
        for at in range(0, len(words), CHUNK):
            some = words[at : at + CHUNK]
            weight = torch.arange(1, 2 * len(some), 2, device=some.device)
            total = (total * 31 + int((some * weight).sum()) + i) & 0xFFFFFFFFFFFFFFFF
    return total - (1 << 64) if total >= 1 << 63 else total


# (load [L, E], plan [L, P], rows [K, L, E]) -> plan; on rank 0, in the round's thread
Planner = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def by_load(slots: Slots, min_gain: float) -> Planner:
    """parallel/eplb/policy.py, for layers that gain by it."""

    def planner(load: np.ndarray, plan: np.ndarray, rows: np.ndarray) -> np.ndarray:
        new = policy.plan(load, slots, plan, rows, pause=lambda: time.sleep(0))
        better = policy.worthwhile(load, plan, new, slots.ranks, min_gain)
        return np.where(better[:, None], new, plan)

    return planner


@dataclass
class Round:
    """What a round's thread and the step's thread tell each other."""

    rows: np.ndarray  # [ROWS, L, E] load of this rank's rows, newest first
    plan: np.ndarray  # [L, P] as it is
    ready: int = 0  # written by the round's thread: steps done here
    go: int = 0  # written by the step's thread: steps done everywhere
    total: int | None = None  # steps in all, once known
    failed: str = ""
    cancelled: bool = False
    news: threading.Event = field(default_factory=threading.Event)  # go or cancelled was written
    staged: tuple[int, np.ndarray, Placement, list[int]] | None = None  # layer, its plan, placement, slots to copy

    def wait(self, mover: Mover) -> None:
        """This rank has done its step; return when all have."""
        self.ready += 1
        while self.go < self.ready and not self.cancelled:
            self.news.wait(REST_S)
            self.news.clear()
            mover.rest()
        if self.cancelled:
            raise Cancelled


@dataclass
class Counts:
    """Since the start."""

    rounds: int = 0
    abandoned: int = 0
    layers: int = 0
    bytes: int = 0
    checked: int = 0
    seconds: float = 0.0  # of the step's thread
    reasons: list[str] = field(default_factory=list)  # of rounds abandoned here
    balance: dict[str, float] = field(default_factory=dict)  # rank 0: of the latest window, as it was and as planned


class Rebalancer:
    """Of the target, or of the drafter. ``now``: seconds of a clock."""

    def __init__(
        self, held: Experts, mover: Mover, plan: np.ndarray, how: Eplb, now: Callable[[], float],
        planner: Planner | None = None,
    ):  # fmt: skip
        self.held, self.mover, self.how, self.now = held, mover, how, now
        self.planner = planner or by_load(held.slots, how.min_gain)
        self.plan = plan.copy()  # [L, P]
        self.rows, self.staging = mover.rows, mover.staging
        self.counts = Counts()
        self.window = Window(len(plan), held.slots.experts, how.window_steps)
        self.round: Round | None = None
        self._sums: np.ndarray | None = None  # [L, E] checksum of each expert, once known
        self._steps, self._since, self._idle = 0, 0.0, True
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="eplb", daemon=True)
        self._thread.start()

    # --- the step's thread ---

    def row(self) -> list[int]:
        r = self.round
        if r is None:
            return [0, 0, int(self._idle and not self.mover.broken)]
        if not r.failed and self.now() - self._since > self.how.timeout_s:
            r.failed = f"no progress for {self.how.timeout_s:g} s at step {r.go} of the round"
        return [r.ready, int(bool(r.failed)), 0]

    def agreed(self, rows: np.ndarray, worked: bool) -> None:
        """``rows`` [n, COLUMNS] of all ranks, equal on all; no step is in flight. ``worked``: one is about to run."""
        begin = self.now()
        if worked:
            self._steps += 1
            if self.window.step():
                self.window.see(self._counters(), self.plan)
        if self.round is not None:
            self._go_on(rows)
        elif self._steps >= self.how.interval_steps and rows[:, 2].all():
            self._start()
        self.counts.seconds += self.now() - begin

    def close(self) -> None:
        if self.round is not None:
            self.round.cancelled = True
            self.round.news.set()
        self._asked.put(None)
        self._thread.join(1.0)  # a stuck one is a daemon

    def _counters(self) -> np.ndarray:
        return self.held.load[:, : self.held.slots.total].cpu().numpy()

    def _start(self) -> None:
        self._steps, self._since, self._idle = 0, self.now(), False
        self.round = Round(self.window.rows(), self.plan.copy())
        self._asked.put(self.round)

    def _go_on(self, rows: np.ndarray) -> None:
        r = self.round
        if rows[:, 1].any():
            r.cancelled = True
            r.news.set()
            self.counts.abandoned += 1
            self.counts.reasons.append(r.failed or "another rank gave up")
            self.round = None
        elif rows[:, 0].min() > r.go:
            if r.staged is not None:
                self._swap(*r.staged)
                r.staged = None
            self._since, r.go = self.now(), r.go + 1
            r.news.set()
            if r.go == r.total:
                self.counts.rounds += 1
                self.round = None

    def _swap(self, layer: int, plan: np.ndarray, place: Placement, slots: list[int]) -> None:
        self.window.credit(self._counters(), self.plan)
        for row, staged in zip(self.rows[layer], self.staging, strict=True):
            for s in slots:
                row[s].copy_(staged[s])
        expert.write(self.held.places[layer], place)
        self.plan[layer] = plan
        self.counts.layers += 1

    # --- the round's thread ---

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread
        while (r := self._asked.get()) is not None:
            try:
                self._run(r)
            except Cancelled:
                pass
            except Exception as error:
                r.failed = f"{type(error).__name__}: {error}"
                while not r.cancelled:
                    r.news.wait(REST_S)
            self._idle = True

    def _run(self, r: Round) -> None:
        """Steps: loads shown; plan shown; then one for each layer."""
        mover, shape = self.mover, (len(r.plan), self.held.slots.experts)
        self.mover.put(self._shown(r))
        r.wait(mover)
        total = mover.total()
        if total is not None:
            mover.put(self._planned(r, total))
        r.wait(mover)
        sums, new = self._unpack(mover.first(), shape, r.plan.shape)
        if self._sums is None:
            self._sums = sums
        order = np.flatnonzero((new != r.plan).any(1)).tolist()
        r.total = 2 + 1 + len(order)
        for layer in order:
            todo = moves(r.plan[layer], new[layer], mover.ranks)
            mover.fetch(layer, todo, lambda: r.cancelled)
            mine = self._check(layer, new[layer], todo)
            place = expert.placement(torch.from_numpy(new[layer]), shape[1], self.held.slots.replicas)
            r.staged = layer, new[layer], place, mine
            r.wait(mover)
        r.wait(mover)  # all ranks know that this was the last one

    def _shown(self, r: Round) -> np.ndarray:
        """Loads of this rank's rows, and in the first round checksums of experts whose first replica is here."""
        sums = np.zeros((len(r.plan), self.held.slots.experts), np.int64)
        if self._sums is None:
            each = r.plan.shape[1] // self.mover.ranks
            for layer, plan in enumerate(r.plan):
                for slot in range(each):
                    p = self.mover.rank * each + slot
                    if p == np.flatnonzero(plan == plan[p])[0]:
                        sums[layer, plan[p]] = checksum([t[slot] for t in self.rows[layer]])
        return self._sized(sums, r.rows)

    def _planned(self, r: Round, total: np.ndarray) -> np.ndarray:
        """Checksums and the plan, from the sums of what all ranks have shown."""
        sums, rows = self._unpack(total, r.rows.shape[1:], r.rows.shape)
        slots, load = self.held.slots, recent(rows)
        new = self.planner(load, r.plan, rows)
        for when, plan in (("before", r.plan), ("planned", new)):
            t = metric.rank_loads(metric.slot_loads(load, plan), slots.ranks)
            self.counts.balance[when] = metric.balancedness(t)
        return self._sized(sums if self._sums is None else self._sums, new)

    def _sized(self, *parts: np.ndarray) -> np.ndarray:
        flat = np.concatenate([p.ravel() for p in parts])
        return np.pad(flat, (0, shown(len(self.plan), self.held.slots) - len(flat)))

    @staticmethod
    def _unpack(values: np.ndarray, *shapes: tuple[int, ...]) -> list[np.ndarray]:
        ends = np.cumsum([np.prod(s) for s in shapes])
        return [v.reshape(s).copy() for v, s in zip(np.split(values, ends), shapes)]

    def _check(self, layer: int, new: np.ndarray, todo: list[Move]) -> list[int]:
        """Slots of this rank that were staged. Raises RuntimeError for one that holds another expert than it should."""
        each = len(new) // self.mover.ranks
        mine = [m for m in todo if m.to // each == self.mover.rank]
        for m in mine:
            parts = [t[m.to % each] for t in self.staging]
            if checksum(parts) != self._sums[layer, new[m.to]]:
                raise RuntimeError(f"layer {layer}: expert {new[m.to]} arrived with another checksum in slot {m.to}")
            self.counts.checked += 1
            self.counts.bytes += sum(p.numel() for p in parts)
        return [m.to % each for m in mine]


def shown(layers: int, slots: Slots) -> int:
    """Length of what ranks put: checksums [L, E], and loads [ROWS, L, E] or a plan [L, P]."""
    return layers * (slots.experts + max(ROWS * slots.experts, slots.total))


class Rebalancing:
    """The rider of a step agreement (serve/lockstep.py): target and drafter, each with a state of its own."""

    def __init__(self, parts: dict[str, Rebalancer]):
        self.parts, self.width = parts, WIDTH

    @property
    def busy(self) -> bool:
        """Whether a round is under way, which goes on without steps too."""
        return any(part.round is not None for part in self.parts.values())

    def row(self) -> list[int]:
        told = [value for part in self.parts.values() for value in part.row()]
        return told + [0] * (WIDTH - len(told))

    def agreed(self, rows: np.ndarray, worked: bool) -> None:
        for i, part in enumerate(self.parts.values()):
            part.agreed(rows[:, i * COLUMNS : (i + 1) * COLUMNS], worked)

    def stats(self) -> dict[str, float]:
        """Counters since the start."""
        named = ("rounds", "abandoned", "layers", "bytes", "seconds")
        return {f"eplb_{n}_{f}": getattr(p.counts, f) for n, p in self.parts.items() for f in named}

    def close(self) -> None:
        for part in self.parts.values():
            part.close()
