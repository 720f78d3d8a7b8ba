"""What is rehearsed are the sizes that steps have, all of them; and nothing stays of it but that."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from model.pack import Span, pack
from model.transformer import forward
from serve import rehearse
from tests import small

ROWS, SEQUENCES, LEAST = 256, 12, 16
SHAPES = set(rehearse.shapes(ROWS, SEQUENCES, LEAST))
PREFILL = st.lists(st.integers(2, ROWS // 2), max_size=3)


@given(st.integers(0, SEQUENCES - 3), st.integers(1, 4), PREFILL)
def test_every_step_has_sizes_that_were_rehearsed(decoding, block, prefill):
    lengths = [block] * decoding + prefill
    if not lengths or sum(lengths) > ROWS:
        return
    batch = pack([Span(np.zeros(n, np.int64), 0, 0, (0,) * 4) for n in lengths], 64, LEAST)
    assert len(batch.tokens) in {n for n, _, _ in SHAPES}
    assert tuple(batch.tiles.shape) in {(t, r) for _, t, r in SHAPES}


def test_they_are_few_and_large_ones_come_first():
    assert len(list(rehearse.shapes(512, 32, 16))) <= 110 and len(list(rehearse.shapes(2048, 256, 16))) <= 250
    assert next(rehearse.shapes(ROWS, SEQUENCES, LEAST))[0] == ROWS


@pytest.mark.parametrize("drafts", [False, True])
def test_nothing_stays_but_scratch(drafts, monkeypatch):
    r, seen = small.runner(small.config(), pages=6, slots=4), set()

    def noted(model, cache, batch, rows):
        seen.add((len(batch.tokens), *batch.tiles.shape))
        return forward(model, cache, batch, rows)

    monkeypatch.setattr(rehearse.transformer, "forward", noted)
    for pool in tree_leaves(r.cache):
        pool.fill_(7)
    count = rehearse.rehearse(r, 24, 3, drafts)
    assert seen == set(rehearse.shapes(24, 3, 16)) and count == len(list(rehearse.shapes(24, 3, 16))) + 2 * drafts
    layout, cache = r.model.layout, r.cache
    for pool, scratch in (
        (cache.pages, layout.stride),
        (cache.rings, layout.slot_rings),
        (cache.tails, layout.slot_tails),
        (cache.tokens, layout.token_depth),
    ):
        assert torch.equal(pool[scratch:], torch.full_like(pool[scratch:], 7))
    assert not cache.load.any()
