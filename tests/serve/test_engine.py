"""The engine on a small random model, fp32 and batch-invariant: whatever the loop does, a request's tokens are its own.

What is exact (everything but bounded replay of windows) is compared token by token and, where told, bit by bit.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.request import Pause, Sampling
from serve.schedule.pages import chain
from tests import small
from tests.serve.harness import Bench

CFG = small.config()  # window 8, 6 layers, sources 1 and 3, a drafter of 3
BASE = small.tokens(260, seed=9)
LENGTHS = (1, 5, 30, 64, 65, 100, 130)
ASKS = [(small.tokens(n, seed=n), Sampling(20, (i % 2) * 0.9, seed=i)) for i, n in enumerate(LENGTHS)]
PREFIXED = [
    (BASE[:n], Sampling(12, t, seed=3)) for n, t in ((200, 0.0), (240, 0.9), (129, 0.0), (260, 0.8), (256, 0.0))
]


@cache
def model():
    return small.model(CFG)


def bench(**how) -> Bench:
    return Bench(model(), **how)


@cache
def alone(prefill: str = "full") -> list[list[int]]:
    """Tokens of each of ASKS and PREFIXED, run alone and undrafted on an engine of its own."""
    return [bench(prefill=prefill).run(ask)[0] for ask in (*ASKS, *PREFIXED)]


WAYS = [
    {},
    {"overlap": 1},
    {"max_batch": 2},
    {"long_prefill_tokens": 1},
    {"long_prefill_tokens": 7, "overlap": 1},
    {"speculate": True},
    {"speculate": True, "block": 1},
    {"speculate": True, "block": 2, "overlap": 1},
    {"speculate": True, "speculation": {"adaptive": True}},
    {"speculate": True, "speculation": {"adaptive": True, "row_cost": 0.3}, "overlap": 1},
]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_among_others_as_alone(how):
    assert bench(**how).run(*ASKS) == alone()[: len(ASKS)]


@pytest.mark.parametrize("window", ["halo", "retain"])
@pytest.mark.parametrize("how", [{}, {"speculate": True}, {"overlap": 1, "long_prefill_tokens": 50}], ids=str)
def test_prefix_hits_change_nothing_where_windows_are_exact(window, how):
    b = bench(window=window, **how)
    got = [b.run(ask)[0] for ask in (*PREFIXED, *PREFIXED)]
    assert got == alone()[len(ASKS) :] * 2
    hits = [a.finish.cached_tokens for a in b.answers.values()]
    assert hits[0] == 0 and all(h >= 128 for h in hits[5:]), "anything cached can be hit"


def test_hits_among_requests_that_run_together():
    b = bench(window="halo", budget_tokens=64)
    assert b.run(*PREFIXED, *PREFIXED) == alone()[len(ASKS) :] * 2


def test_bounded_replay_is_approximate_and_leaves_cached_pages_alone():
    """The hit's pages keep their bits; what is replayed is one window."""
    b = bench(window="replay")
    b.run(PREFIXED[0])
    cache, size = b.engine.device.runner.cache.pages, model().layout.stride
    held = b.engine.scheduler.pages.find(chain(BASE[:192], b.serve.page_size), 3)
    bits = lambda: [cache[p * size : (p + 1) * size].clone() for p in held]  # noqa: E731
    before = bits()
    b.run(PREFIXED[3])
    finish = b.answers[2].finish
    assert (finish.cached_tokens, finish.replayed_tokens) == (192, CFG.sliding_window)
    assert all(map(torch.equal, before, bits()))


@pytest.mark.parametrize("replayed", [CFG.sliding_window, 64])
def test_a_hit_that_saves_nothing_is_not_adopted(replayed):
    b = bench(window="replay" if replayed == CFG.sliding_window else "halo")
    b.run((BASE[:65], Sampling(2)), (BASE[:66], Sampling(2)))
    b.run((BASE[:66], Sampling(2)))
    cached = b.answers[3].finish.cached_tokens
    assert cached == (64 if b.engine.scheduler.rule.replayed < 64 else 0)


@pytest.mark.parametrize("how", [{}, {"long_prefill_tokens": 17}, {"speculate": True}, {"overlap": 1}], ids=str)
def test_replay_from_layer_20_is_exact_relative_to_the_decoders(how):
    want = None
    for prefill in ("decoder_replay", "layer20_replay"):
        b = bench(prefill=prefill, **how)
        asks = [(tokens, Sampling(s.max_tokens, s.temperature, s.seed, logprobs=2)) for tokens, s in PREFIXED]
        b.run(*asks)
        got = [(a.tokens, [x.chosen.tolist() for x in a.logprobs]) for a in b.answers.values()]
        want = want or got
        assert got == want


def test_trimmed_prefill_is_another_approximation_than_full():
    """The switch does something: late layers see short windows, so log-probabilities move, a little."""
    told = []
    for prefill in ("full", "decoder_replay"):
        b = bench(prefill=prefill)
        b.ask(BASE[:200], Sampling(1, logprobs=0))
        b.drain()
        told.append(float(b.answers[1].logprobs[0].chosen[0]))
    assert told[0] != told[1] and abs(told[0] - told[1]) < 1.0


TIGHT = [(small.tokens(60, seed=i), Sampling(80, (i % 2) * 0.8, seed=i)) for i in range(5)]


@cache
def tight() -> list[list[int]]:
    return [bench().run(ask)[0] for ask in TIGHT]


@pytest.mark.parametrize(
    "how",
    [
        {"pages": 5},
        {"pages": 6, "speculate": True},
        {"pages": 5, "overlap": 1, "speculate": True, "window": "halo"},
        {"pages": 6, "window": "retain", "speculate": True},
    ],
    ids=str,
)
def test_preempted_as_not_preempted(how):
    b = bench(**how)
    assert b.run(*TIGHT) == tight()
    assert b.engine.stats()["preempted_total"] > 0, "the pool was large enough: nothing tested"


def test_n_completions_are_n_requests_with_their_seeds():
    one = [bench().run((BASE[:70], Sampling(10, 1.0, seed=s)))[0] for s in (5, 6, 7)]
    assert bench(window="halo").run(*((BASE[:70], Sampling(10, 1.0, seed=s)) for s in (5, 6, 7))) == one
    assert len({tuple(t) for t in one}) == 3


def test_truncated_sampling_and_stops_do_not_depend_on_company_or_drafts():
    how = Sampling(30, 1.0, seed=7, stop_ids=(3, 4, 5, 6, 7, 8), top_p=0.6, top_k=9, min_tokens=6)
    want = bench().run((BASE[:70], how))[0]
    assert len(want) >= 6 and not set(want[6:]) & set(how.stop_ids)
    assert bench(speculate=True).run((BASE[:70], how), *ASKS)[0] == want


def test_min_tokens_keeps_stops_away_and_no_longer():
    free = bench().run((BASE[:40], Sampling(30)))[0]
    stop = (free[4],)
    assert bench().run((BASE[:40], Sampling(30, stop_ids=stop)))[0] == free[: free.index(stop[0])]
    held = bench().run((BASE[:40], Sampling(30, stop_ids=stop, min_tokens=9)))[0]
    assert len(held) >= 9 and stop[0] not in held[:9]


@pytest.mark.parametrize("how", [{}, {"speculate": True}, {"long_prefill_tokens": 20, "window": "halo"}], ids=str)
def test_logprobs_are_one_for_each_token_and_the_same_in_any_company(how):
    def told(b: Bench) -> list:
        b.ask(BASE[:150], Sampling(9, 0.7, seed=1, logprobs=3, prompt_logprobs=2))
        b.drain()
        a = b.answers[max(b.answers)]
        cat = lambda parts, name: np.concatenate([getattr(p, name) for p in parts]).tolist()  # noqa: E731
        assert len(cat(a.logprobs, "chosen")) == len(a.tokens)
        assert len(cat(a.prompt_logprobs, "chosen")) == 149
        return [cat(p, n) for p in (a.logprobs, a.prompt_logprobs) for n in ("chosen", "ids", "values")]

    b = bench(**how)
    b.run(PREFIXED[0])
    assert told(b) == told(bench())


def test_forced_acceptance_gives_that_many_tokens_a_step():
    b = bench(speculate=True, speculation={"force_acceptance": 2.5})
    b.run(*((small.tokens(9, seed=i), Sampling(60, seed=i)) for i in range(8)))
    done = b.engine.stats()
    steps = sum(len(a.tokens) - 1 for a in b.answers.values()) / (done["accepted_total"] / 1.5)
    assert 2.2 < steps < 2.8


def test_empty_and_endless_requests_are_refused_by_name():
    b = bench(pages=2)
    for tokens, message in ((BASE[:0], "empty"), (BASE[:128], "context"), (np.arange(5000) % 90, "context")):
        handle = b.ask(tokens, Sampling(4))
        b.drain()
        finish = b.answers[handle].finish
        assert finish.reason == "error" and message in finish.message
    assert b.run((BASE[:100], Sampling(4)))[0] == bench().run((BASE[:100], Sampling(4)))[0]


def test_an_abort_at_any_step_leaks_nothing_and_disturbs_nobody():
    want = alone()[: len(ASKS)]
    for overlap in (0, 1):
        for when in range(0, 14, 2):
            b = bench(overlap=overlap, speculate=True, window="retain", budget_tokens=32)
            handles = [b.ask(*a) for a in ASKS]
            b.steps(when)
            for h in handles[::2]:
                b.abort(h)
                b.abort(h)
            b.drain()
            for h, tokens in zip(handles, want, strict=True):
                a = b.answers[h]
                assert a.tokens == tokens if a.finish.reason != "abort" else a.tokens == tokens[: len(a.tokens)]


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_mix_gives_each_request_its_own_tokens(data):
    """Chunks, pools, drafts, hits, overlap and arrival times at random, over and over the same requests."""
    d = data.draw
    how = {
        "window": d(st.sampled_from(("none", "halo", "retain"))),
        "overlap": d(st.integers(0, 1)),
        "pages": d(st.sampled_from((6, 9, 30))),
        "max_batch": d(st.integers(1, 6)),
        "long_prefill_tokens": d(st.sampled_from((3, 31, 512))),
        "budget_tokens": d(st.sampled_from((7, 40, 200))),
        "speculate": d(st.booleans()),
        "block": d(st.sampled_from((None, 1, 2))),
    }
    b, wants = bench(**how), {}
    asks, want = (*ASKS, *PREFIXED), alone()
    for _ in range(d(st.integers(2, 10))):
        i = d(st.integers(0, len(asks) - 1))
        wants[b.ask(*asks[i])] = want[i]
        b.steps(d(st.integers(0, 9)))
    b.drain()
    assert {h: a.tokens for h, a in b.answers.items()} == wants


def test_failure_25_an_oracles_drafts_are_all_accepted(monkeypatch):
    """Acceptance collapses past some position only if drafts and verification are out of step there."""
    prompt, how = BASE[:30], Sampling(25, 0.8, seed=4)
    want = bench().run((prompt, how))[0]
    b = bench(speculate=True)
    runner = b.engine.device.runner
    made = runner.draft

    def oracle(batch, least=0):
        first = int(batch.positions[0]) + 1 - len(prompt)
        known = (want[first : first + runner.block] + [0] * runner.block)[: runner.block]
        return replace(made(batch, least), tokens=torch.tensor([known]))

    monkeypatch.setattr(runner, "draft", oracle)
    assert b.run((prompt, how))[0] == want
    stats = b.engine.stats()
    assert stats["accepted_total"] == stats["drafted_total"] > 15
    assert stats["steps_total"] == 1 + -(-24 // (runner.block + 1))


@pytest.mark.parametrize("how", [{}, {"overlap": 1, "speculate": True}], ids=str)
def test_nothing_runs_while_the_engine_is_paused_and_then_it_goes_on(how):
    b = bench(**how)
    handles = [b.ask(*a) for a in ASKS]
    b.steps(5)
    b.mail.send(Pause())
    b.abort(handles[3])
    b.steps(1)
    before = {h: list(a.tokens) for h, a in b.answers.items()}
    late = b.ask(*ASKS[0])
    b.steps(10)
    assert {h: b.answers[h].tokens for h in before} == before and not b.answers[late].tokens
    assert b.answers[handles[3]].finish.reason == "abort", "aborts are told all the same"
    b.mail.send(Pause(False))
    b.drain()
    for i, h in enumerate(handles):
        assert i == 3 or b.answers[h].tokens == alone()[i]
