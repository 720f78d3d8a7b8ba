"""Packing: from what each sequence does in a step to the integer tensors of a `Batch`. Host work, numpy only.

A few sequences are written as spans; an engine has them as arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.sizes import padded
from model.batch import Batch

ROW_MULTIPLE = 8  # rows of a step are a multiple of it
TILE_ROWS = 64  # most rows of one tile


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a step.

    ``tokens`` int64 [n]; ``start`` position of the first; ``slot`` >= 1 and ``pages`` (numbers >= 1) of the sequence,
    enough for ``start + n`` tokens; positions below ``write_from`` write no global rows (they are cached already);
    windows see nothing below ``floor``.
    """

    tokens: np.ndarray
    start: int
    slot: int
    pages: Sequence[int] = field(default_factory=tuple)
    write_from: int = 0
    floor: int = 0


@dataclass(frozen=True)
class Rows:
    """The same for all sequences of a step as arrays, without their pages: B sequences, N tokens one sequence after
    another."""

    tokens: np.ndarray  # [N]
    starts: np.ndarray  # [B]
    counts: np.ndarray  # [B] tokens of each, >= 1
    slots: np.ndarray  # [B]
    write_from: np.ndarray  # [B]
    floors: np.ndarray  # [B]


def pack(spans: Sequence[Span], page_size: int, least: int = ROW_MULTIPLE, device: torch.device | str = "cpu") -> Batch:
    """One step's batch. Rows keep the order of ``spans``; row 0 is the first span's first token.

    Rows are padded to ``least`` or more, and to one of few sizes (kernels/sizes.py), multiples of 8; sequence 0, slot
    0, page 0 are scratch. Raises ValueError for an empty span or one that its pages cannot hold.
    """
    for s in spans:
        if len(s.tokens) == 0:
            raise ValueError(f"the span of slot {s.slot} at {s.start} has no tokens")
        if len(s.pages) * page_size < s.start + len(s.tokens):
            raise ValueError(f"{s.start + len(s.tokens)} tokens do not fit {len(s.pages)} pages of {page_size}")
    whole = lambda values: np.array(values, np.int64)  # noqa: E731
    tables = np.zeros((len(spans) + 1, max((2, *(len(s.pages) for s in spans)))), np.int64)
    for i, s in enumerate(spans, start=1):
        tables[i, : len(s.pages)] = s.pages
    rows = Rows(
        tokens=np.concatenate([whole([]), *(s.tokens for s in spans)]),
        starts=whole([s.start for s in spans]),
        counts=whole([len(s.tokens) for s in spans]),
        slots=whole([s.slot for s in spans]),
        write_from=whole([s.write_from for s in spans]),
        floors=whole([s.floor for s in spans]),
    )
    return pack_rows(rows, torch.from_numpy(tables).to(device), page_size, least)


def pack_rows(rows: Rows, tables: Tensor, page_size: int, least: int = ROW_MULTIPLE) -> Batch:
    """As `pack`, of sequences that are arrays already: a few array operations whatever their number and length.

    ``tables`` [B + 1, P] int64, P >= 2: pages of each sequence behind the scratch one, on the device that is to run the
    step, where it is looked up where a row is written. Where they are of more sequences than ``rows``, the others are
    padding.
    """
    total, count = len(rows.tokens), len(rows.counts)
    size = padded(max(total, least), ROW_MULTIPLE)
    ends, first = rows.starts + rows.counts, np.cumsum(rows.counts) - rows.counts
    seq = np.repeat(np.arange(count), rows.counts)
    pos = np.arange(total) - first[seq] + rows.starts[seq]

    def per_row(values: np.ndarray, fill: int = 0) -> np.ndarray:
        out = np.full(size, fill, np.int64)
        out[:total] = values
        return out

    per_seq = np.zeros((4, len(tables)), np.int64)
    per_seq[:, 1 : count + 1] = rows.slots, rows.starts, ends, first
    put = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(tables.device)  # noqa: E731
    written = pos >= rows.write_from[seq]
    owner, place = put(per_row(np.where(written, seq + 1, 0))), put(per_row(np.where(written, pos, 0)))
    return Batch(
        put(per_row(rows.tokens)),
        put(per_row(pos, -1)),
        put(per_row(seq + 1)),
        tables[owner, place // page_size] * page_size + place % page_size,
        put(per_row(rows.floors[seq])),
        *map(put, per_seq),
        tables,
        *map(put, _tiles(rows.counts, first, size, len(tables) - 1)),
    )


def _tiles(counts: np.ndarray, first: np.ndarray, rows: int, least: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles [T, R] of rows of one sequence (-1 none, the last tile empty), each row's place, each tile's sequence.
    Sizes are few: R is a power of 2."""
    height = padded(max(2, min(TILE_ROWS, int(counts.max(initial=1)))), octave=1)
    per_seq = -(-counts // height)
    tiles, total = int(per_seq.sum()), int(counts.sum())
    size = 1 + padded(max(tiles, least), 2)
    owner = np.repeat(np.arange(len(counts)), per_seq)
    number = np.arange(tiles) - (np.cumsum(per_seq) - per_seq)[owner]  # of the tile within its sequence
    inside = number[:, None] * height + np.arange(height)
    table = np.full((size, height), -1, np.int64)
    table[:tiles] = np.where(inside < counts[owner][:, None], first[owner][:, None] + inside, -1)
    tile_of = np.full(rows, (size - 1) * height, np.int64)
    place = np.flatnonzero(table >= 0)
    tile_of[:total] = place
    seqs = np.zeros(size, np.int64)
    seqs[:tiles] = owner + 1
    return table, tile_of, seqs


def last_rows(spans: Sequence[Span]) -> torch.Tensor:
    """Row number of each span's last token, int64 [len(spans)]."""
    return torch.tensor(np.cumsum([len(s.tokens) for s in spans]) - 1)
