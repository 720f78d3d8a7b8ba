"""Agreement: a config with itself, replay forms, KL by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from scripts.evaluation import agreement, given
from scripts.evaluation.settings import Agreement
from tests.scripts.evaluation.conftest import TEXT

A = Agreement(against=("self",), samples=2, prompt=200, tail=4, hit=128)


def between(g, name: str, a: Agreement = A) -> agreement.Distance:
    sequences = given.passages(g, a.samples, a.prompt + a.tail)
    own, other = ([read(g.runner, s, a) for s in sequences] for read in (agreement.cold, agreement.READS[name]))
    assert all(x.shape == (a.tail, TEXT.vocab_size) for x in (*own, *other))
    return agreement.distance(own, other)


def test_a_config_agrees_with_itself(g):
    figures = between(g, "self").figures()
    assert figures == {"kl": 0.0, "kl_p99": 0.0, "top1": 1.0, "kl_last": 0.0, "top1_last": 1.0}


@pytest.mark.parametrize("name", ["decoder_replay", "source_replay", "hit_replay", "last_window"])
def test_replay_is_near_but_not_equal(g, name):
    assert 0 < between(g, name).kl.mean() < 1


def test_the_exact_form_of_the_cut_one_layer_earlier(g):
    a, b = (between(g, name).kl for name in ("decoder_replay", "layer20_replay"))
    assert np.array_equal(a, b)


@pytest.mark.parametrize(("name", "prompt", "hit"), [("decoder_replay", 64, 1), ("hit_replay", 100, 64)])
def test_replay_of_everything_is_exact(g, name, prompt, hit):
    """A prompt, or a cached prefix, no longer than the window."""
    assert not between(g, name, replace(A, prompt=prompt, hit=hit)).kl.any()


def test_engram_sees_the_ids_before_the_replay(g, monkeypatch):
    sequence = given.passages(g, 1, A.prompt + A.tail)[0]
    good = agreement.hit_replay(g.runner, sequence, A)
    assert torch.equal(agreement.hit_replay(g.runner, sequence, A), good)
    monkeypatch.setattr(agreement, "remember", lambda runner, slot, ids, before: runner.cache.tokens.fill_(7))
    assert not torch.equal(agreement.hit_replay(g.runner, sequence, A), good)


def test_other_numerics_through_the_whole_command(g, tmp_path):
    a = Agreement(against=("self", "qat"), samples=1, prompt=32, tail=3, hit=1)
    result = agreement.run(replace(g, settings=replace(g.settings, agreement=a)))
    assert result["kl_self"] == 0 and result["kl_qat"] > 0 and result["top1_self"] == 1
    assert (tmp_path / "agreement.csv").read_text().startswith("against,kl,kl_p99,top1,kl_last,top1_last\nself,0.0,")


REFUSED = [
    (("magic",), 128, "unknown 'magic'; known: self, decoder_replay"),
    (("packed",), 128, "cache=packed stores quantised values"),
    (("hit_replay",), 100, "agreement.hit must be a multiple of serve.page_size 64"),
]


@pytest.mark.parametrize(("against", "hit", "message"), REFUSED)
def test_sides_that_cannot_be(g, against, hit, message):
    a = replace(A, against=against, hit=hit)
    with pytest.raises(ValueError, match=message):
        agreement.check(replace(g, settings=replace(g.settings, agreement=a)))


def test_kl_by_hand():
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    found = agreement.distance([p], [q])
    assert found.kl[0, 0] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3)) and not found.top1[0, 0]
