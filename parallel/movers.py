"""How the experts of a layer get from rank to rank in the background: by gloo, or by one-sided reads over a link.

Slots of a rank are rows of byte matrices, one for each tensor that an expert has (weights and scales alike). Calls of
one mover come from one thread, in the same order on all ranks, each after all ranks have agreed that the one before it
is done. No mover shares a communicator with the step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.port import DONE, Link, LinkError

POLL_S = 0.0002


class Cancelled(Exception):
    """The round was abandoned while a copy ran."""


@dataclass(frozen=True)
class Move:
    """Slot ``to`` gets the expert of slot ``source``; numbers over all ranks."""

    to: int
    source: int


def moves(old: np.ndarray, new: np.ndarray, ranks: int) -> list[Move]:
    """What changes a layer's plan [P] from ``old`` to ``new``: from the same rank where it has the expert, else from
    the ranks that have it in turns."""
    each, asked, out = len(old) // ranks, {}, []
    for to in np.flatnonzero(old != new).tolist():
        e = new[to]
        have = np.flatnonzero(old == e)
        here = have[have // each == to // each]
        turn = asked.setdefault(int(e), 0)
        out.append(Move(to, int(here[0] if len(here) else have[turn % len(have)])))
        asked[int(e)] += not len(here)
    return out


class Mover(Protocol):
    rank: int
    ranks: int
    rows: Sequence[Sequence[Tensor]]  # [L][..] of [S, bytes]
    staging: Sequence[Tensor]  # [..] of [S, bytes]
    broken: str  # why it is of no more use, if it is

    def put(self, values: np.ndarray) -> None:
        """Show int64 [n] to the others; n is always the same."""
        ...

    def total(self) -> np.ndarray | None:
        """Sum of what all ranks have put, on rank 0."""
        ...

    def first(self) -> np.ndarray:
        """What rank 0 has put."""
        ...

    def fetch(self, layer: int, todo: Sequence[Move], cancelled: Callable[[], bool]) -> None:
        """Copy what this rank lacks into its staging rows; returns when others have also what they need of it, or can
        get it without its doing. Raises Cancelled, or what the transport raises."""
        ...

    def rest(self) -> None:
        """Called now and then while the round waits."""
        ...


class GlooMover:
    """Sends and receives in a group of its own. After a copy that failed the group is of no more use."""

    def __init__(self, group: dist.ProcessGroup, rows: Sequence[Sequence[Tensor]], staging: Sequence[Tensor]):
        self.group, self.rows, self.staging = group, rows, staging
        self.rank, self.ranks, self.broken = group.rank(), group.size(), ""
        self._values = np.zeros(0, np.int64)

    def put(self, values: np.ndarray) -> None:
        self._values = values.copy()

    def total(self) -> np.ndarray | None:
        with self._breaking():
            sums = torch.from_numpy(self._values)
            dist.all_reduce(sums, group=self.group)
        return sums.numpy() if self.rank == 0 else None

    def first(self) -> np.ndarray:
        with self._breaking():
            values = torch.from_numpy(self._values)
            dist.broadcast(values, group=self.group, group_src=0)
        return values.numpy()

    def fetch(self, layer: int, todo: Sequence[Move], cancelled: Callable[[], bool]) -> None:
        rows, each = self.rows[layer], len(self.staging[0])
        with self._breaking():
            works = []
            for m in todo:
                to, source = m.to // each, m.source // each
                for i, (row, staged) in enumerate(zip(rows, self.staging, strict=True)):
                    tag = m.to * len(rows) + i
                    if to == source == self.rank:
                        staged[m.to % each].copy_(row[m.source % each])
                    elif to == self.rank:
                        works.append(dist.irecv(staged[m.to % each], group=self.group, group_src=source, tag=tag))
                    elif source == self.rank:
                        works.append(dist.isend(row[m.source % each], group=self.group, group_dst=to, tag=tag))
            for work in works:
                work.wait()
        if cancelled():
            raise Cancelled

    def rest(self) -> None:
        pass

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise


class LinkMover:
    """One-sided reads. ``meet(about)`` gives the names of the ranks' links, by rank, once all have registered.
    ``values``: length of what ranks put."""

    def __init__(
        self, link: Link, rank: int, ranks: int, rows: Sequence[Sequence[Tensor]], staging: Sequence[Tensor],
        values: int, meet: Callable[[bytes], list[str]],
    ):  # fmt: skip
        self.link, self.rank, self.ranks, self.rows, self.staging, self.broken = link, rank, ranks, rows, staging, ""
        self._shown, self._seen = np.zeros(values, np.int64), np.zeros(values, np.int64)
        self._regions = [[link.register(t) for t in layer] for layer in rows]
        self._staged = [link.register(t) for t in staging]
        self._at_shown, self._at_seen = link.register(self._shown), link.register(self._seen)
        self.names = meet(link.about())

    def put(self, values: np.ndarray) -> None:
        self._shown[:] = values

    def total(self) -> np.ndarray | None:
        if self.rank:
            return None
        sums = self._shown.copy()
        for rank in range(1, self.ranks):
            sums += self._look(rank)
        return sums

    def first(self) -> np.ndarray:
        return self._shown.copy() if self.rank == 0 else self._look(0).copy()

    def fetch(self, layer: int, todo: Sequence[Move], cancelled: Callable[[], bool]) -> None:
        each, wanted = len(self.staging[0]), {}
        for m in todo:
            if m.to // each != self.rank:
                continue
            for i, (row, staged) in enumerate(zip(self.rows[layer], self.staging, strict=True)):
                size, to, source = row.shape[1], m.to % each, m.source % each
                if m.source // each == self.rank:
                    staged[to].copy_(row[source])
                else:
                    spans = (self._staged[i], to * size, size), (self._regions[layer][i], source * size, size)
                    wanted.setdefault(m.source // each, []).append(spans)
        tickets = [
            self.link.post("read", self.names[rank], *np.array(spans, np.int64).transpose(1, 0, 2))
            for rank, spans in wanted.items()
        ]
        self._finish(tickets, cancelled)

    def rest(self) -> None:
        self.link.notes()  # a peer that first reads from here may need an answer

    def _look(self, rank: int) -> np.ndarray:
        size = self._seen.nbytes
        spans = np.array([[(self._at_seen, 0, size)], [(self._at_shown, 0, size)]], np.int64)
        self._finish([self.link.post("read", self.names[rank], *spans)], lambda: False)
        return self._seen

    def _finish(self, tickets: list, cancelled: Callable[[], bool]) -> None:
        """Wait for all copies, also when one failed or the round is over: they write to the staging rows."""
        failed = None
        while tickets:
            left = []
            for ticket in tickets:
                try:
                    if self.link.poll(ticket) != DONE:
                        left.append(ticket)
                except LinkError as error:
                    failed = error
            tickets = left
            if tickets:
                time.sleep(POLL_S)
        if failed is not None:
            raise failed
        if cancelled():
            raise Cancelled


def meet(link: Link, group: dist.ProcessGroup, about: bytes) -> list[str]:
    """Tell all ranks of ``group`` about this one's link, and meet theirs; their names, by rank."""
    size = torch.tensor([len(about)])
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    mine = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    mine[: len(about)] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    every = [torch.zeros_like(mine) for _ in sizes]
    dist.all_gather(every, mine, group=group)
    told = [bytes(t[: int(n)].numpy()) for t, n in zip(every, sizes, strict=True)]
    return [link.name if rank == group.rank() else link.meet(its) for rank, its in enumerate(told)]
