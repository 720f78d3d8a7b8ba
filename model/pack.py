"""Packing: from what each sequence does in a step to the integer tensors of a `Batch`. Host work, numpy only."""

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


def pack(spans: Sequence[Span], page_size: int, least: int = ROW_MULTIPLE, device: torch.device | str = "cpu") -> Batch:
    """One step's batch. Rows keep the order of ``spans``; row 0 is the first span's first token.

    Rows are padded to a multiple of 8, ``least`` or more; sequence 0, slot 0, page 0 are scratch. Raises ValueError for
    an empty span or one that its pages cannot hold.
    """
    lengths = [len(s.tokens) for s in spans]
    for s, n in zip(spans, lengths, strict=True):
        if n == 0:
            raise ValueError(f"the span of slot {s.slot} at {s.start} has no tokens")
        if len(s.pages) * page_size < s.start + n:
            raise ValueError(f"{s.start + n} tokens do not fit {len(s.pages)} pages of {page_size}")
    total = sum(lengths)
    rows = -(-max(total, least) // ROW_MULTIPLE) * ROW_MULTIPLE
    width = max(2, *(len(s.pages) for s in spans)) if spans else 2
    token = np.zeros(rows, np.int64)
    position, seq = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
    slot_mapping, floor = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    per_seq = np.zeros((4, len(spans) + 1), np.int64)  # slots, starts, ends, first rows
    tables = np.zeros((len(spans) + 1, width), np.int64)
    at = 0
    for i, (s, n) in enumerate(zip(spans, lengths, strict=True), start=1):
        where = slice(at, at + n)
        pos = np.arange(s.start, s.start + n)
        tables[i, : len(s.pages)] = s.pages
        token[where], position[where], seq[where], floor[where] = s.tokens, pos, i, s.floor
        slot = tables[i, pos // page_size] * page_size + pos % page_size
        slot_mapping[where] = np.where(pos >= s.write_from, slot, 0)
        per_seq[:, i] = s.slot, s.start, s.start + n, at
        at += n
    tiles = _tiles(lengths, rows)
    arrays = (token, position, seq, slot_mapping, floor, *per_seq, tables, *tiles)
    return Batch(*(torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays))


def _tiles(lengths: Sequence[int], rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles [T, R] of rows of one sequence (-1 none, the last tile empty), each row's place, each tile's sequence."""
    height = max(2, min(TILE_ROWS, max(lengths, default=1)))
    starts = np.cumsum([0, *lengths])
    pieces = [
        (i, begin, min(begin + height, starts[i + 1]))
        for i, n in enumerate(lengths)
        for begin in range(starts[i], starts[i] + n, height)
    ]
    tiles = np.full((len(pieces) + 1, height), -1, np.int64)
    tile_of = np.full(rows, len(pieces) * height, np.int64)
    seqs = np.zeros(len(pieces) + 1, np.int64)
    for t, (i, begin, end) in enumerate(pieces):
        tiles[t, : end - begin] = np.arange(begin, end)
        tile_of[begin:end] = t * height + np.arange(end - begin)
        seqs[t] = i + 1
    return tiles, tile_of, seqs


def last_rows(spans: Sequence[Span]) -> torch.Tensor:
    """Row number of each span's last token, int64 [len(spans)]."""
    return torch.tensor(np.cumsum([len(s.tokens) for s in spans]) - 1)
