"""Filler is exact: lengths to the token, equal where ids are equal, different where they differ."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.load.filler import Filler, Scale, bust, marked, vocabulary

VOCAB = np.arange(7, 107, dtype=np.int32)


@pytest.mark.parametrize("width", [1, 2, 3, 64])
def test_a_block_is_a_function_of_its_id(width):
    filler = Filler(0, "s", VOCAB, width)
    ids = np.array([5, 9, 5, 250, 99, 9])
    rows = filler.blocks(ids).reshape(-1, width)
    assert rows.dtype == np.int32 and np.isin(rows, VOCAB).all()
    assert (rows[0] == rows[2]).all() and (rows[1] == rows[5]).all()
    assert (filler.blocks(ids[3:]).reshape(-1, width) == rows[3:]).all()
    assert (Filler(0, "s", VOCAB, width).blocks(ids) == rows.reshape(-1)).all()


@pytest.mark.parametrize(("width", "count"), [(1, 100), (2, 10_000), (4, 10_000)])
def test_different_ids_give_different_tokens(width, count):
    rows = Filler(3, "session", VOCAB, width).blocks(np.arange(count)).reshape(count, width)
    assert len(np.unique(rows, axis=0)) == count


def test_runs_of_ids_beyond_the_vocabulary_differ_as_pages():
    filler = Filler(0, "s", VOCAB, 1)
    pages = filler.blocks(np.arange(16 * 400)).reshape(400, 16)
    assert len(np.unique(pages, axis=0)) == 400


def test_sessions_and_seeds_share_nothing():
    made = [Filler(seed, name, VOCAB, 1).blocks(np.arange(32)) for seed in (0, 1) for name in ("a", "b", "c/d")]
    assert len(np.unique(np.stack(made), axis=0)) == len(made)


@given(st.integers(0, 500), st.sampled_from((1, 2, 4, 64)), st.integers(0, 3))
def test_prompts_have_their_length(tokens, width, label):
    scale, filler = Scale(64, width), Filler(0, "s", VOCAB, width)
    ids = np.arange(tokens // 64)
    prompt = filler.prompt(ids, scale.prompt(tokens), label)
    assert len(prompt) == scale.prompt(tokens) and prompt.dtype == np.int32
    assert (prompt[: len(ids) * width] == filler.blocks(ids)).all()


def test_tails_belong_to_one_request():
    filler = Filler(0, "s", VOCAB, 64)
    a, b = (filler.prompt(np.arange(2), 160, label) for label in (1, 2))
    assert (a[:128] == b[:128]).all() and (a[128:] != b[128:]).any()
    assert (filler.prompt(np.arange(2), 160, 1) == a).all()


def test_a_partial_last_block_with_an_id_is_cut():
    filler = Filler(0, "s", VOCAB, 8)
    assert (filler.prompt(np.array([4, 5]), 11, 0) == filler.blocks(np.array([4, 5]))[:11]).all()


def test_scale():
    one, whole = Scale(64, 1), Scale(64, 64)
    assert [one.prompt(n) for n in (0, 63, 64, 1000)] == [0, 0, 1, 15]
    assert [one.output(n) for n in (0, 1, 64, 65, 640)] == [1, 1, 1, 2, 10]
    assert [whole.prompt(n) for n in (0, 63, 1000)] == [0, 63, 1000] and whole.output(77) == 77
    assert Scale(64, 4).prompt(100) == 4 + 36 * 4 // 64


def test_marks_are_all_different():
    marks = np.stack([bust(0, play, VOCAB) for play in range(2000)])
    assert len(np.unique(marks[:, :3], axis=0)) == 2000 and np.isin(marks, VOCAB).all()
    assert marked(np.arange(4), marks[0], 2).tolist() == [0, 1, *marks[0], 2, 3]
    assert marked(np.arange(2), marks[0], 9).tolist() == [0, 1, *marks[0]]


def test_vocabulary_leaves_out_special_tokens():
    assert vocabulary(6, (0, 4)).tolist() == [1, 2, 3, 5]
    with pytest.raises(ValueError, match="two or more"):
        vocabulary(3, (0, 2))
