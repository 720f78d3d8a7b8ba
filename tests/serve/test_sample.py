"""Noise is a function of (seed, position) alone, and Gumbel-max draws from the softmax."""

import math

import pytest
import torch

from serve import sample

VOCAB = 16
CHI2_999 = 37.7  # 99.9% of chi-square with 15 degrees of freedom lies below


def test_noise_does_not_depend_on_the_batch():
    seeds, positions = torch.tensor([3, -7, 3, 2**62]), torch.tensor([5, 0, 6, 1_000_000])
    together = sample.gumbel(seeds, positions, VOCAB)
    for i in range(4):
        assert torch.equal(sample.gumbel(seeds[i : i + 1], positions[i : i + 1], VOCAB)[0], together[i])
    assert torch.equal(sample.gumbel(seeds.view(2, 2), positions.view(2, 2), VOCAB).view(4, VOCAB), together)
    assert torch.equal(sample.gumbel(seeds, positions, 2 * VOCAB)[:, :VOCAB], together)


def test_every_seed_position_and_token_has_noise_of_its_own():
    seeds, positions = (t.flatten() for t in torch.meshgrid(torch.arange(-20, 20), torch.arange(20), indexing="ij"))
    noise = sample.gumbel(seeds, positions, VOCAB)
    assert len(noise.flatten().unique()) > 0.99 * noise.numel()


def test_noise_is_finite_at_the_ends_of_the_word(monkeypatch):
    ends = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63)])
    monkeypatch.setattr(sample, "_mix", lambda x: ends.expand(1, 5))
    noise = sample.gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 5)
    assert noise.isfinite().all()
    assert noise.max() > 20 and noise.min() < -2.5


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_draws_follow_the_softmax(vary, temperature):
    draws, logits = 20_000, torch.linspace(-1.5, 1.5, VOCAB)
    moving, fixed = torch.arange(draws), torch.full((draws,), 41)
    pair = (moving, fixed) if vary == "seeds" else (fixed, moving)
    warmth = torch.full((draws,), temperature)
    noise = sample.noise(*pair, warmth, VOCAB)
    picks = sample.pick(logits.expand(draws, -1), sample.inverse(warmth), noise)
    want = draws * torch.softmax(logits / temperature, 0)
    chi2 = ((torch.bincount(picks, minlength=VOCAB) - want) ** 2 / want).sum()
    assert chi2 < CHI2_999


def test_noise_has_the_gumbel_distribution_in_its_tail():
    noise = sample.gumbel(torch.arange(1000), torch.full((1000,), 3), 1000).flatten()
    for level in (0.0, 3.0, 8.0):
        want = 1 - math.exp(-math.exp(-level))
        spread = math.sqrt(want * (1 - want) / noise.numel())
        assert abs((noise > level).double().mean() - want) < 4 * spread


def test_greedy_is_argmax_beside_sampled_rows():
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([0.0, 1.0, 0.0, 5.0, 0.0, 0.0])
    noise = sample.noise(torch.arange(6), torch.arange(6), temperature, VOCAB)
    assert noise[temperature == 0].eq(0).all() and noise[temperature > 0].ne(0).all()
    greedy = temperature == 0
    assert torch.equal(sample.pick(logits, sample.inverse(temperature), noise)[greedy], logits.argmax(-1)[greedy])
    assert not sample.noise(torch.arange(6), torch.arange(6), torch.zeros(6), VOCAB).any()


def test_logits_that_are_not_finite_draw_nothing():
    logits = torch.zeros(2, 8)
    logits[1, 3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        sample.pick(logits, torch.ones(2), torch.zeros(2, 8))
