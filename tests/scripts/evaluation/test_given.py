"""Teacher forcing, passages of text, and what does not fit."""

import pytest
import torch

from scripts import laid
from scripts.evaluation import given
from tests.scripts.evaluation.conftest import TEXT, whole


def test_forced_is_one_long_step(g, monkeypatch):
    monkeypatch.setattr(laid, "CHUNK_TOKENS", 16)
    long, short = given.passages(g, 2, 70)[0], given.passages(g, 2, 70)[1][:21]
    got = given.forced(g.runner, [long, short], 20)
    for sequence, logits in zip((long, short), got, strict=True):
        assert torch.equal(logits, whole(g.runner, sequence)[-20:])


def test_passages_begin_with_a_line(g):
    found = given.passages(g, 5, 30)
    assert all(len(p) == 30 and p[0] == TEXT.bos_id and TEXT.decode([p[1]]) == "\n" for p in found)
    with pytest.raises(ValueError, match="too few for passages of 9999"):
        given.passages(g, 1, 9999)


@pytest.mark.parametrize(
    ("tokens", "sequences", "message"),
    [(10**6, 1, "max_position"), (10, 5, "serve.max_batch is 4"), (512, 4, "needs 32 pages of 64, serve.pages is 16")],
)
def test_what_does_not_fit_the_cache(g, tokens, sequences, message):
    with pytest.raises(ValueError, match=message):
        given.check_room(g.runner, tokens, sequences, "this")
