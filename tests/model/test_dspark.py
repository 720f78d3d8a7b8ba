"""The drafter: against its dense twin, alone and in company, its noise, its floor, and what it leaves in the cache."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model import dense, dense_dspark
from model.dspark import Draft, DraftBatch
from serve.runner import Runner
from tests.small import VOCAB, Seq, by_release_name, config, configs, play, runner, step, tokens

FORMS = [("fp32", "plain"), ("qat", "packed")]
CFG = config()
drafting = configs().filter(lambda c: c.num_nextn_predict_layers)


def ask(anchors: list[int], positions: list[int], slots: list[int], block: int, **more: Tensor) -> DraftBatch:
    """Greedy drafts, unless ``more`` says otherwise."""
    ints = torch.tensor([anchors, positions, slots, [0] * len(anchors)])
    noise = torch.zeros(len(anchors), block, VOCAB)
    return replace(DraftBatch(*ints, torch.ones(len(anchors)), noise), **more)


def assert_close(a: Draft, b: Draft, rows: slice = slice(None)) -> None:
    """Drafts are proposals: their bits may depend on their number, within rounding."""
    assert torch.equal(a.tokens[rows], b.tokens)
    for x, y in ((a.logits, b.logits), (a.confidence, b.confidence)):
        torch.testing.assert_close(x[rows], y, rtol=1e-4, atol=1e-4)


def warmed(form: tuple[str, str], cfg=CFG) -> tuple[Runner, list[Seq]]:
    """A runner that has computed three sequences of 5, 70 and 30 tokens."""
    r = runner(cfg, *form)
    seqs = [Seq(tokens(n, n), slot, pages) for n, slot, pages in ((5, 4, (1,)), (70, 2, (7, 3)), (30, 3, (9,)))]
    step(r, *(s.span(0, len(s.tokens)) for s in seqs))
    return r, seqs


@settings(max_examples=6)
@given(cfg=drafting, seed=st.integers(0, 99), total=st.sampled_from((1, 3, 40)))
def test_paged_equals_dense(cfg, seed, total):
    ids = tokens(total, seed)
    params, batch = by_release_name(cfg), torch.from_numpy(ids)[None]
    tables = dense.hash_tables(cfg, [i % 80 for i in range(VOCAB)]) if cfg.engram_layer_ids else None
    rows = dense.hash_rows(cfg, tables, batch) if tables else ()
    run = dense.Pass(cfg, params, 1, trace=dense.Trace())
    dense.forward(run, batch, rows)
    r = runner(cfg)
    play(r, Seq(ids), [0, total])
    got = r.draft(ask([7], [total], [1], cfg.dspark_block_size))
    features = dense_dspark.context(run, run.trace.taps)
    y, _ = dense_dspark.draft(run, features, torch.tensor([[7]]), torch.tensor([[total - 1]]))
    before = torch.tensor([[[7, *got.tokens[0, :-1].tolist()]]])
    torch.testing.assert_close(got.logits[0], dense_dspark.logits(run, y, before)[0, 0], rtol=1e-4, atol=1e-4)
    want = dense_dspark.confidence(run, y, before)[0, 0]
    torch.testing.assert_close(got.confidence[0], want, rtol=1e-4, atol=1e-4)
    assert torch.equal(got.tokens, got.logits.argmax(-1))


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_company_and_padding_change_no_draft(form):
    r, _ = warmed(form)
    alone = [r.draft(ask([a], [p], [s], 3)) for a, p, s in ((8, 5, 4), (9, 70, 2), (1, 30, 3))]
    together = r.draft(ask([8, 9, 1], [5, 70, 30], [4, 2, 3], 3))
    padded = r.draft(ask([1, 0, 9, 0], [30, -1, 70, -1], [3, 0, 2, 0], 3))
    for i in range(3):
        assert_close(together, alone[i], slice(i, i + 1))
    assert_close(padded, alone[2], slice(0, 1))
    assert_close(padded, alone[1], slice(2, 3))


def test_a_draft_is_drawn_with_the_noise_it_gets():
    r, _ = warmed(FORMS[0])
    noise = 3 * torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    inverse = torch.tensor([1.0, 0.25])
    plain = r.draft(ask([9, 1], [70, 30], [2, 3], 3))
    got = r.draft(ask([9, 1], [70, 30], [2, 3], 3, noise=noise, inv_temperature=inverse))
    assert torch.equal(got.tokens, (got.logits * inverse.view(2, 1, 1) + noise).argmax(-1))
    assert not torch.equal(got.tokens, plain.tokens)
    assert torch.equal(got.logits[:, 0], plain.logits[:, 0])  # the first row knows the anchor alone
    assert not torch.equal(got.logits[:, 1], plain.logits[:, 1])  # the second the token drawn before it


def test_drafting_writes_nothing_but_its_load():
    r, _ = warmed(FORMS[0])
    pools = (r.cache.pages, r.cache.rings, r.cache.tails, r.cache.tokens)
    before, load = [p.clone() for p in pools], r.cache.load.clone()
    r.draft(ask([8, 9, 1], [5, 70, 30], [4, 2, 3], 3))
    assert all(torch.equal(p, old) for p, old in zip(pools, before))
    more = (r.cache.load - load)[:, :-1].sum(1)
    assert more.tolist() == [0] * CFG.num_hidden_layers + [3 * 3 * CFG.dspark_num_experts_per_tok] * 2


def test_a_block_sees_its_window_of_context_and_no_more():
    """NaN in the oldest ring rows, of which one ring holds a draft block beyond the window."""
    r, _ = warmed(FORMS[0])
    clean = r.draft(ask([1], [30], [3], 3))
    window = CFG.sliding_window
    for position, reached in ((29 - window, False), (30 - window, True)):
        row = 3 * r.model.layout.slot_rings + r.model.addresses[-1].ring + position % CFG.ring_size
        kept = r.cache.rings[row].clone()
        r.cache.rings[row] = torch.nan
        got = r.draft(ask([1], [30], [3], 3))
        assert got.logits.isnan().any().item() == reached
        floored = r.draft(ask([1], [30], [3], 3, floors=torch.tensor([position + 1])))
        assert not floored.logits.isnan().any()
        r.cache.rings[row] = kept
    assert torch.equal(r.draft(ask([1], [30], [3], 3)).logits, clean.logits)
