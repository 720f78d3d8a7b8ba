"""Random rows of a table in host memory: 4 KB pages against 2 MB pages, with the kernel's own count of them.

All tables hold the same bytes; they take turns with the same indices, and must give equal rows. Time is the thread's
own: what others do on the core does not count."""

import time
from collections.abc import Iterator
from statistics import median, quantiles

import torch

from parallel import hosttable
from parallel.hosttable import HostTable
from scripts import memory, report
from scripts.build import Settings, build_device
from scripts.progress import progress

COLUMNS = 256  # bytes of a row, as Engram's
BLOCK = 1 << 18  # rows of a block
GATHER = 1 << 14  # rows of a gather
TURNS = 61
KINDS = {"4 KB, private": (False, False), "2 MB, private": (False, True), "2 MB, shared": (True, True)}


def blocks(rows: int) -> Iterator[torch.Tensor]:
    """The same bytes each time."""
    draw = torch.Generator().manual_seed(0)
    block = torch.randint(0, 256, (BLOCK, COLUMNS), generator=draw, dtype=torch.uint8)
    for start in range(0, rows, BLOCK):
        block = block + 1  # wraps
        yield block[: rows - start]


def measure(tables: list[HostTable]) -> list[list[float]]:
    """Processor seconds of each turn of each table. Raises ValueError if rows differ."""
    draw = torch.Generator().manual_seed(1)
    times: list[list[float]] = [[] for _ in tables]
    out = torch.empty(GATHER, COLUMNS, dtype=torch.uint8)
    with progress("bench=hosttable", TURNS, "turns") as advance:
        for _ in range(TURNS):
            ids = torch.randint(0, len(tables[0].rows), (GATHER,), generator=draw)
            expected = None
            for table, own in zip(tables, times, strict=True):
                begin = time.thread_time()
                torch.index_select(table.rows, 0, ids, out=out)
                own.append(time.thread_time() - begin)
                if expected is not None and not torch.equal(out, expected):
                    raise ValueError("bench=hosttable: tables give different rows; no figures")
                expected = out.clone()
            advance(1)
    return times


def run(s: Settings) -> dict:
    """Table by kind of page; keys ``ratio`` (4 KB over 2 MB, both private), ``ratio_shared``, ``huge_kb``,
    ``fallback``."""
    build_device(s)
    gb = s.benches.hosttable.gb
    rows = int(gb * 2**30) // COLUMNS
    need, there = len(KINDS) * rows * COLUMNS, memory.available(torch.device("cpu"))
    if not COLUMNS <= need <= there:
        raise ValueError(f"benches.hosttable.gb={gb} takes {need} bytes for {len(KINDS)} tables, {there} are free")
    made = [hosttable.create(rows, COLUMNS, torch.uint8, blocks(rows), *how) for how in KINDS.values()]
    times = measure(made)
    middle = [median(own) for own in times]
    spread = [quantiles(own, n=4) for own in times]
    report.table(
        "hosttable",
        (
            "pages",
            "ns a row",
            "quartiles",
            "GB/s",
            "4 KB / this",
            "AnonHugePages or ShmemPmdMapped, kB",
            "what the kernel gave",
        ),
        [
            [name, t / GATHER * 1e9, f"{q[0] / GATHER * 1e9:.1f} .. {q[2] / GATHER * 1e9:.1f}"]
            + [GATHER * COLUMNS / t / 1e9, middle[0] / t, table.pages.huge_kb, str(table.pages)]
            for name, t, q, table in zip(KINDS, middle, spread, made, strict=True)
        ],
    )
    own, both = made[1].pages, made[2].pages
    counts = {"huge_kb": own.huge_kb, "huge_kb_shared": both.huge_kb, "gb": gb}
    fallback = "; ".join(f"{p.kind}: {p}" for p in (own, both) if p.huge_kb < p.size_kb) or "none"
    ratios = {"ratio": round(middle[0] / middle[1], 3), "ratio_shared": round(middle[0] / middle[2], 3)}
    return {**ratios, **counts, "fallback": fallback, "threads": s.threads}
