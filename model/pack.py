"""Packing: from what each sequence does in a step to the integer tensors of a `Batch`. Host work, numpy only.

A few sequences are written as spans; an engine has them as arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from model.batch import Batch

ROW_MULTIPLE = 8  # rows of a step are padded to a multiple of it
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
    """The same for all sequences of a step as arrays: B sequences, N tokens one sequence after another, P pages."""

    tokens: np.ndarray  # [N]
    starts: np.ndarray  # [B]
    counts: np.ndarray  # [B] tokens of each, >= 1
    slots: np.ndarray  # [B]
    write_from: np.ndarray  # [B]
    floors: np.ndarray  # [B]
    tables: np.ndarray  # [B, P] pages


def pack(spans: Sequence[Span], page_size: int, least: int = ROW_MULTIPLE, device: torch.device | str = "cpu") -> Batch:
    """One step's batch. Rows keep the order of ``spans``; row 0 is the first span's first token.

    Rows are padded to a multiple of 8, ``least`` or more; sequence 0, slot 0, page 0 are scratch. Raises ValueError for
    an empty span or one that its pages cannot hold.
    """
    for s in spans:
        if len(s.tokens) == 0:
            raise ValueError(f"the span of slot {s.slot} at {s.start} has no tokens")
        if len(s.pages) * page_size < s.start + len(s.tokens):
            raise ValueError(f"{s.start + len(s.tokens)} tokens do not fit {len(s.pages)} pages of {page_size}")
    whole = lambda values: np.array(values, np.int64)  # noqa: E731
    tables = np.zeros((len(spans), max((len(s.pages) for s in spans), default=0)), np.int64)
    for i, s in enumerate(spans):
        tables[i, : len(s.pages)] = s.pages
    rows = Rows(
        tokens=np.concatenate([whole([]), *(s.tokens for s in spans)]),
        starts=whole([s.start for s in spans]),
        counts=whole([len(s.tokens) for s in spans]),
        slots=whole([s.slot for s in spans]),
        write_from=whole([s.write_from for s in spans]),
        floors=whole([s.floor for s in spans]),
        tables=tables,
    )
    return pack_rows(rows, page_size, least, device)


def pack_rows(rows: Rows, page_size: int, least: int = ROW_MULTIPLE, device: torch.device | str = "cpu") -> Batch:
    """As `pack`, of sequences that are arrays already: a few array operations whatever their number."""
    total, count = len(rows.tokens), len(rows.counts)
    padded = -(-max(total, least) // ROW_MULTIPLE) * ROW_MULTIPLE
    ends, first = rows.starts + rows.counts, np.cumsum(rows.counts) - rows.counts
    seq = np.repeat(np.arange(count), rows.counts)
    pos = np.arange(total) - first[seq] + rows.starts[seq]
    tables = np.zeros((count + 1, max(2, rows.tables.shape[1])), np.int64)
    tables[1:, : rows.tables.shape[1]] = rows.tables
    slot = tables[1 + seq, pos // page_size] * page_size + pos % page_size

    def per_row(values: np.ndarray, fill: int = 0) -> np.ndarray:
        out = np.full(padded, fill, np.int64)
        out[:total] = values
        return out

    per_seq = np.zeros((4, count + 1), np.int64)
    per_seq[:, 1:] = rows.slots, rows.starts, ends, first
    arrays = (
        per_row(rows.tokens),
        per_row(pos, -1),
        per_row(seq + 1),
        per_row(np.where(pos >= rows.write_from[seq], slot, 0)),
        per_row(rows.floors[seq]),
        *per_seq,
        tables,
        *_tiles(rows.counts, first, padded),
    )
    return Batch(*(torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays))


def _tiles(counts: np.ndarray, first: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles [T, R] of rows of one sequence (-1 none, the last tile empty), each row's place, each tile's sequence."""
    height = max(2, min(TILE_ROWS, int(counts.max(initial=1))))
    per_seq = -(-counts // height)
    tiles, total = int(per_seq.sum()), int(counts.sum())
    owner = np.repeat(np.arange(len(counts)), per_seq)
    number = np.arange(tiles) - (np.cumsum(per_seq) - per_seq)[owner]  # of the tile within its sequence
    inside = number[:, None] * height + np.arange(height)
    table = np.full((tiles + 1, height), -1, np.int64)
    table[:-1] = np.where(inside < counts[owner][:, None], first[owner][:, None] + inside, -1)
    tile_of = np.full(rows, tiles * height, np.int64)
    place = np.flatnonzero(table >= 0)
    tile_of[:total] = place
    seqs = np.zeros(tiles + 1, np.int64)
    seqs[:-1] = owner + 1
    return table, tile_of, seqs


def last_rows(spans: Sequence[Span]) -> torch.Tensor:
    """Row number of each span's last token, int64 [len(spans)]."""
    return torch.tensor(np.cumsum([len(s.tokens) for s in spans]) - 1)
