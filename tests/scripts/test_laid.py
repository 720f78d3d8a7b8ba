"""Sequences side by side: each in its own place, chunks give the rows of one long step, last windows by hand."""

import numpy as np
import pytest
import torch

from scripts import build
from scripts.laid import Laid
from tests.scripts.test_generate import settings as configure

LENGTHS = (21, 7)
SEQUENCES = [np.random.default_rng(n).integers(4, 2048, n) for n in LENGTHS]


@pytest.fixture(scope="module")
def laid():
    return Laid(build.build_runner(configure("serve.pages=16", "serve.max_batch=4"))[0], 2)


def test_each_has_a_slot_and_pages(laid):
    spans = [laid.span(i, np.arange(3), 5) for i in range(4)]
    assert [s.slot for s in spans] == [1, 2, 3, 4]
    assert [page for s in spans for page in s.pages] == list(range(1, 9))
    other = laid.span(1, np.arange(3), 5, slot=4, floor=2)
    assert (other.slot, other.pages, other.start, other.floor) == (4, spans[1].pages, 5, 2)


def test_chunks_want_rows_from_the_first_on(laid):
    chunks = list(laid.chunks(SEQUENCES, [10, 0], 8))
    assert [c.tokens for c in chunks] == [15, 8, 5]
    assert [[(i, at.tolist()) for i, at in c.wanted] for c in chunks] == [
        [(0, []), (1, list(range(7)))],
        [(0, list(range(10, 16)))],
        [(0, list(range(16, 21)))],
    ]
    assert [c.rows.tolist() for c in chunks] == [list(range(8, 15)), list(range(2, 8)), list(range(5))]


def test_prefill_and_decode_are_one_long_step(laid):
    whole = []
    for i, sequence in enumerate(SEQUENCES):
        whole.append(laid.runner.step([laid.span(i, sequence, 0)], torch.arange(len(sequence)))[0])
    for got, want, first in zip(laid.prefill(SEQUENCES, [10, 0], 8), whole, (10, 0), strict=True):
        assert torch.equal(got, want[first:])
    laid.prefill([s[:6] for s in SEQUENCES], [5, 5])
    got = laid.decode(np.array([s[6] for s in SEQUENCES]), 6)
    assert torch.equal(got, torch.stack([rows[6] for rows in whole]))


def test_a_trim_keeps_last_windows(laid):
    window = laid.runner.model.cfg.sliding_window
    trim, last = laid.trim([np.arange(window + 5) + 4, SEQUENCES[1]], 3)
    kept = [*range(5, window + 5), *range(window + 5, window + 12)]
    assert trim.rows[: len(kept)].tolist() == kept and not trim.rows[len(kept) :].any()
    assert last.tolist() == [window - 1, window + 6] and (trim.layer, trim.whole_windows) == (3, False)
