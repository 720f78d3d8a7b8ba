"""Packing: rows, tables, tiles and padding of a step, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.pack import TILE_ROWS, Span, last_rows, pack

PAGE = 64


def span(n: int, start: int = 0, slot: int = 1, pages: tuple[int, ...] = (3, 7), **more: int) -> Span:
    return Span(np.arange(n) + 10 * slot, start, slot, pages, **more)


def test_two_sequences_and_padding():
    batch = pack([span(3, start=63, slot=4), span(2, slot=2, pages=(5,))], PAGE)
    assert batch.tokens.tolist() == [40, 41, 42, 20, 21, 0, 0, 0]
    assert batch.positions.tolist() == [63, 64, 65, 0, 1, -1, -1, -1]
    assert batch.seqs.tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [3 * 64 + 63, 7 * 64, 7 * 64 + 1, 5 * 64, 5 * 64 + 1, 0, 0, 0]
    assert batch.slots.tolist() == [0, 4, 2]
    assert batch.starts.tolist() == [0, 63, 0]
    assert batch.ends.tolist() == [0, 66, 2]
    assert batch.first_rows.tolist() == [0, 0, 3]
    assert batch.page_tables.tolist() == [[0, 0], [3, 7], [5, 0]]
    assert last_rows([span(3), span(2)]).tolist() == [2, 4]


def test_cached_rows_are_not_written_and_floors_are_per_row():
    batch = pack([span(4, start=62, write_from=64, floor=60), span(1, slot=2)], PAGE)
    assert batch.slot_mapping.tolist() == [0, 0, 7 * 64, 7 * 64 + 1, 3 * 64, 0, 0, 0]
    assert batch.floors.tolist() == [60] * 4 + [0] * 4


@pytest.mark.parametrize(("n", "least", "rows"), [(1, 8, 8), (1, 16, 16), (8, 8, 8), (9, 8, 16), (17, 16, 24)])
def test_rows_are_padded(n, least, rows):
    assert len(pack([span(n)], PAGE, least).tokens) == rows


def test_an_empty_step_is_padding_only():
    batch = pack([], PAGE)
    assert batch.positions.tolist() == [-1] * 8 and batch.page_tables.shape == (1, 2)


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="slot 1 at 5 has no tokens"):
        pack([span(0, start=5)], PAGE)
    with pytest.raises(ValueError, match="129 tokens do not fit 2 pages of 64"):
        pack([span(29, start=100)], PAGE)
    pack([span(28, start=100)], PAGE)


@given(st.lists(st.integers(1, 2 * TILE_ROWS + 3), min_size=1, max_size=5))
def test_tiles_hold_each_row_once_and_one_sequence_each(lengths):
    batch = pack([span(n, slot=i + 1, pages=(1, 2, 3)) for i, n in enumerate(lengths)], PAGE)
    total, tiles = sum(lengths), batch.tiles
    assert sorted(tiles[tiles >= 0].tolist()) == list(range(total))
    assert torch.equal(tiles.flatten()[batch.tile_of[:total]], torch.arange(total))
    assert (tiles.flatten()[batch.tile_of[total:]] == -1).all()
    owner = torch.where(tiles >= 0, batch.seqs[tiles.clamp(min=0)], batch.tile_seqs.unsqueeze(1))
    assert (owner == batch.tile_seqs.unsqueeze(1)).all()
    assert (tiles[-1] == -1).all() and 2 <= tiles.shape[1] <= TILE_ROWS
