"""Tables in host memory, one copy for all processes of a node, on 2 MB pages where the kernel gives them. R rows of C.

An Engram table is read in random rows of a few hundred bytes: with 4 KB pages nearly each one also walks the page
table. `create` asks for large pages, then counts in /proc/self/smaps what came of it: `Pages` says it, and if it was
less than all, why. Anonymous private memory takes the "enabled" setting of the kernel's transparent huge pages,
memory shared between processes its "shmem_enabled", or, where that forbids it, MADV_COLLAPSE once the rows are there.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import shared
from parallel.shared import HUGE, MADV_COLLAPSE, MADV_HUGEPAGE, MADV_NOHUGEPAGE, Segment

THP = Path("/sys/kernel/mm/transparent_hugepage")
CHUNK = 32 * HUGE  # bytes collapsed by one call
NODE = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid"))  # processes that see each other's files
FILLED_S = 3600.0  # for whoever makes a table to fill it


@dataclass(frozen=True)
class Pages:
    """What a mapping lies on. Sizes in kB."""

    kind: str  # private | shared
    size_kb: int  # that hold rows, in whole large pages
    huge_kb: int  # of them on 2 MB pages, as smaps counts
    fallback: str = ""  # the kernel's reason for the rest

    def __str__(self) -> str:
        share = self.huge_kb / self.size_kb
        if share == 1:
            return "2 MB pages"
        return f"{f'2 MB pages for {share:.1%}, else ' if share else ''}4 KB pages: {self.fallback}"


@dataclass(frozen=True)
class HostTable:
    """``rows`` [R, C] lies in host memory; ``address`` opens a shared one in another process while this one lives."""

    rows: Tensor
    pages: Pages
    address: str | None = None
    segment: Segment | None = None


class Node:
    """Tables of this node's ranks: the first to come makes each, the others attach. ``store`` is one that all ranks
    reach; None: this process alone. No name is left behind: memory is freed with the last process that holds it,
    however it ends. ``pages``: what each table of this process lies on."""

    def __init__(self, store: dist.Store | None = None):
        boot, space = NODE
        self.store, self.name = store, f"hosttable/{boot.read_text().strip()}/{space.readlink()}"
        self.first = store is None or store.add(self.name, 1) == 1
        self.pages: dict[str, Pages] = {}
        self._held: list[HostTable] = []  # others may open what we made until `close`

    def table(
        self, name: str, rows: int, columns: int, dtype: torch.dtype, blocks: Callable[[], Iterable[Tensor]]
    ) -> Tensor:
        """The table [R, C] called ``name``, not to be written; ``blocks`` is asked for its rows on one rank only."""
        key = f"{self.name}/{name}"
        if self.first:
            table = create(rows, columns, dtype, blocks(), share=self.store is not None)
            if self.store is not None:
                self.store.set(key, table.address)
        else:
            self.store.wait([key], timedelta(seconds=FILLED_S))
            table = attach(self.store.get(key).decode())
        self.pages[name] = table.pages
        self._held.append(table)
        return table.rows

    def close(self) -> None:
        """From now on nobody else can open what we made; who has, keeps it."""
        self._held.clear()

    def __str__(self) -> str:
        """How much it is, whether shared, and on which pages."""
        kinds = {f"{p.kind}, {p}" for p in self.pages.values()}
        return f"{sum(p.size_kb for p in self.pages.values()):,} kB of host memory, {'; '.join(sorted(kinds))}"


def create(
    rows: int, columns: int, dtype: torch.dtype, blocks: Iterable[Tensor], share: bool = True, huge: bool = True
) -> HostTable:
    """A table filled from blocks of consecutive rows [r, C]. ``huge`` False forbids large pages (for comparison).

    Raises ValueError where the blocks do not make R rows of that shape and dtype.
    """
    size = -(-rows * columns * dtype.itemsize // HUGE) * HUGE
    segment = shared.create(size) if share else None
    array = shared.mapped(size, segment.fd if segment else -1)
    refused = shared.advise(array, 0, size, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
    table = _view(array, rows, columns, dtype)
    fill(table, blocks)
    if huge and share:
        refused = refused or collapse(array)
    name = f"{segment.address}?{rows}x{columns}x{str(dtype).removeprefix('torch.')}" if segment else None
    return HostTable(table, proof(array, share, huge, refused), name, segment)


def attach(address: str) -> HostTable:
    """The table that another process made, the same memory. Writing to it ends this process (SIGSEGV)."""
    where, _, shape = address.partition("?")
    try:
        rows, columns, name = shape.split("x")
        rows, columns, dtype = int(rows), int(columns), getattr(torch, name)
    except (ValueError, AttributeError):
        raise ValueError(f"hosttable: {address!r} is no address of a table") from None
    segment = shared.attach(where)
    if rows * columns * dtype.itemsize > segment.size:
        raise ValueError(f"hosttable: {address} says {rows} x {columns} {name}, more than its {segment.size} bytes")
    array = shared.mapped(segment.size, segment.fd, writable=False)
    refused = shared.advise(array, 0, segment.size, MADV_HUGEPAGE)
    table = _view(array, rows, columns, dtype)
    touch(array)
    return HostTable(table, proof(array, True, True, refused), address, segment)


def fill(table: Tensor, blocks: Iterable[Tensor]) -> None:
    """Copy blocks into consecutive rows."""
    at = 0
    for block in blocks:
        if block.shape[1:] != table.shape[1:] or block.dtype != table.dtype or at + len(block) > len(table):
            raise ValueError(
                f"hosttable: a block of {tuple(block.shape)} {block.dtype} at row {at} does not fit into "
                f"{tuple(table.shape)} {table.dtype}"
            )
        table[at : at + len(block)] = block
        at += len(block)
    if at != len(table):
        raise ValueError(f"hosttable: the blocks hold {at} rows, the table has {len(table)}")


def collapse(array: ctypes.Array) -> str:
    """Ask for large pages once the memory is filled, whatever the settings. "" or the kernel's first refusal."""
    starts = range(0, len(array), CHUNK)
    refusals = [shared.advise(array, at, min(CHUNK, len(array) - at), MADV_COLLAPSE) for at in starts]
    return next((f"MADV_COLLAPSE: {r}" for r in refusals if r), "")


def touch(array: ctypes.Array) -> None:
    """Read a byte of each 4 KB page, so that all are mapped."""
    torch.frombuffer(array, dtype=torch.uint8)[::4096].sum()


def proof(array: ctypes.Array, share: bool, huge: bool, refused: str) -> Pages:
    """Count the mapping's large pages; name the reason where some are missing."""
    counts = shared.smaps(array)
    large = sum(counts[key] for key in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"))
    kind, size = ("shared" if share else "private"), len(array) // 1024
    if large >= size:
        return Pages(kind, size, large)
    file = THP / ("shmem_enabled" if share else "enabled")
    setting = file.read_text().strip() if file.is_file() else "missing"
    why = ["asked not to"] if not huge else [w for w in (refused, f"{file.name}: {setting}") if w]
    return Pages(kind, size, large, "; ".join(why))


def _view(array: ctypes.Array, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(array, dtype=dtype, count=rows * columns).view(rows, columns)
