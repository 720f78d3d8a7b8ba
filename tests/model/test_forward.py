"""The whole against its parts on random models: chunks, company, decode, drafts, stale memory, storage; and the dense
forward, which shares no code with the paged one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import choose
from kernels.registry import recording
from model import dense
from model.dspark import DraftBatch
from tests.small import VOCAB, Seq, by_release_name, config, configs, every, play, runner, step, tokens

FORMS = [("fp32", "plain"), ("qat", "plain"), ("qat", "packed")]
TOTAL = 74  # beyond one page, every window, index_topk and the candidate budget
BUDGET = settings(max_examples=8)
MODELS = {"cfg": configs(), "seed": st.integers(0, 99)}
forms = pytest.mark.parametrize("form", FORMS, ids="-".join)


@forms
@BUDGET
@given(chunk=st.sampled_from((11, 25, 40)), **MODELS)
def test_chunks_and_decode_equal_the_whole(form, cfg, chunk, seed):
    seq = Seq(tokens(TOTAL, seed))
    whole = play(runner(cfg, *form), seq, [0, TOTAL])
    cuts = [*every(chunk, TOTAL - 2), TOTAL - 1, TOTAL]  # the last two rows are decode steps
    assert torch.equal(play(runner(cfg, *form), seq, cuts), whole)
    assert whole.isfinite().all()


@forms
@BUDGET
@given(**MODELS)
def test_company_changes_no_bit(form, cfg, seed):
    """Three sequences of other lengths, pages and speeds share two steps; one is decoding while others prefill."""
    seqs = [
        Seq(tokens(TOTAL, seed), 2, (7, 3)),
        Seq(tokens(31, seed + 1), 5, (1,)),
        Seq(tokens(67, seed + 2), 1, (4, 12, 2)),
    ]
    alone = [play(runner(cfg, *form), s, [0, len(s.tokens)]) for s in seqs]
    r, (a, b, c) = runner(cfg, *form), seqs
    first = step(r, b.span(0, 30), c.span(0, 1), a.span(0, 65))
    second = step(r, a.span(65, TOTAL), b.span(30, 31), c.span(1, 67))
    together = [torch.cat((first[2], second[0])), torch.cat((first[0], second[1])), torch.cat((first[1], second[2]))]
    for got, want in zip(together, alone, strict=True):
        assert torch.equal(got, want)


@settings(max_examples=4)
@given(**MODELS)
def test_without_invariance_parts_are_close(cfg, seed):
    """Rows are no longer padded to where the bits stop depending on their number."""
    seq, other = Seq(tokens(TOTAL, seed)), Seq(tokens(5, seed + 1), 2, (1,))
    whole = play(runner(cfg), seq, [0, TOTAL])
    r = runner(cfg, "fp32", "plain", False)
    parts = [play(r, seq, [0, 40]), step(r, seq.span(40, 72), other.span(0, 5))[0], play(r, seq, [72, 73, 74])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_small_chunks(chunk):
    """Chunks below the window, and below the pair of a ratio-2 group."""
    seq, cfg = Seq(tokens(27)), config(index_topk=3, candidate_topk_blocks=2)
    assert torch.equal(play(runner(cfg), seq, every(chunk, 27)), play(runner(cfg), seq, [0, 27]))


@BUDGET
@given(**MODELS)
def test_packed_storage_equals_plain(cfg, seed):
    seq = Seq(tokens(TOTAL, seed))
    plain, packed = (play(runner(cfg, "qat", cache), seq, [0, 33, TOTAL - 1, TOTAL]) for cache in ("plain", "packed"))
    assert torch.equal(packed, plain)


@pytest.mark.parametrize("numerics", ["fp32", "qat"])
def test_packed_weights_equal_dense(numerics):
    seq, cfg = Seq(tokens(20)), config()
    dense_out, packed = (play(runner(cfg, numerics, weights=w), seq, [0, 20]) for w in ("dense", "packed"))
    assert torch.equal(packed, dense_out)


# --- memory: stale, foreign, rejected, scratch ---


@forms
def test_a_slot_is_reused_without_a_trace(form):
    seq, cfg = Seq(tokens(TOTAL)), config()
    clean = play(runner(cfg, *form), seq, [0, 40, TOTAL])
    r = runner(cfg, *form)
    play(r, Seq(tokens(90, 5), seq.slot, seq.pages), [0, 50, 90])
    assert torch.equal(play(r, seq, [0, 40, TOTAL]), clean)


@forms
@settings(max_examples=4)
@given(cfg=configs().filter(lambda c: c.num_nextn_predict_layers), seed=st.integers(0, 99))
def test_rejected_drafts_leave_no_trace(form, cfg, seed):
    """At every position, right and wrong drafts are verified; the wrong ones reach into the next page."""
    seq, block = Seq(tokens(TOTAL, seed)), cfg.dspark_block_size
    clean = play(runner(cfg, *form), seq, [0, TOTAL])
    r = runner(cfg, *form)
    rows, at, right = [play(r, seq, [0, 59])], 59, 0
    while at < 68:
        ids = np.concatenate((seq.tokens[: at + 1 + right], (seq.tokens[at + 1 + right :] + 1) % VOCAB))
        drafted = Seq(ids, seq.slot, seq.pages)
        rows.append(step(r, drafted.span(at, at + 1 + block))[0][: 1 + right])
        at, right = at + 1 + right, (right + 1) % (block + 1)
    got = torch.cat([*rows, step(r, seq.span(at, TOTAL))[0]])
    assert torch.equal(got, clean)


def test_memory_that_nobody_wrote_is_never_read():
    """NaN everywhere but in scratch changes nothing; padding leaves scratch finite."""
    seq, cfg = Seq(tokens(TOTAL)), config()
    clean, r = play(runner(cfg), seq, [0, 40, TOTAL]), runner(cfg)
    r.cache.pages[r.model.layout.stride :] = torch.nan
    r.cache.rings[r.model.layout.slot_rings :] = torch.nan
    r.cache.tails[r.model.layout.slot_tails :] = 1e6
    r.cache.tokens[r.model.layout.token_depth :] = VOCAB - 1
    assert torch.equal(play(r, seq, [0, 40, TOTAL]), clean)
    assert r.cache.pages[: r.model.layout.stride].isfinite().all()
    assert r.cache.rings[: r.model.layout.slot_rings].isfinite().all()


def test_a_step_writes_only_its_own_pages_and_slot():
    seq, cfg = Seq(tokens(70), slot=3, pages=(5, 2)), config()
    r = runner(cfg)
    play(r, seq, [0, 33, 70])
    pages = r.cache.pages.view(r.pages, -1).ne(0).any(1)
    assert pages.nonzero().flatten().tolist() in ([2, 5], [0, 2, 5])
    for pool in (r.cache.rings, r.cache.tails, r.cache.tokens):
        slots = pool.view(r.slots, -1).ne(0).any(1)
        assert slots.nonzero().flatten().tolist() in ([3], [0, 3])


def test_load_counts_each_valid_token():
    """Per layer the experts that `route` chose for the 13 tokens, and nothing for the padding."""
    cfg = config()
    r = runner(cfg)
    with recording(r.model.rt.kernels.names()) as log:
        r.model = replace(r.model, rt=replace(r.model.rt, kernels=choose("recorded")))
        step(r, Seq(tokens(9)).span(0, 9), Seq(tokens(4, 1), 2, (1,)).span(0, 4))
        r.draft(DraftBatch(*torch.tensor([[3, 4], [9, 4], [1, 2], [0, 0]]), torch.ones(2), torch.zeros(2, 3, VOCAB)))
        chosen = [out[0] for name, _, out in log if name == "route"]
    rows = [13] * cfg.num_hidden_layers + [2 * cfg.dspark_block_size] * cfg.num_nextn_predict_layers
    experts = r.cache.load.shape[1] - 1
    for ids, n, load in zip(chosen, rows, r.cache.load, strict=True):
        assert load[:experts].tolist() == torch.bincount(ids[:n].flatten(), minlength=experts).tolist()
        assert load[:experts].sum() == 2 * n and load[experts] == ids[n:].numel()


# --- what the other tests rely on, and the independent forward ---


@pytest.mark.parametrize(
    "off",
    [
        {"index_topk": 64, "candidate_topk_blocks": 40},
        {"candidate_source_layer_id": -1},
        {"candidate_topk_blocks": 40},
        {"sliding_window": 64},
    ],
    ids=lambda off: next(iter(off)),
)
def test_every_limit_is_in_force(off):
    seq = Seq(tokens(TOTAL))
    limited, free = (play(runner(cfg), seq, [0, TOTAL]) for cfg in (config(), replace(config(), **off)))
    assert not torch.allclose(limited, free, 1e-3)


def test_a_model_without_candidates_needs_no_block_size():
    free, unset = config(candidates=False), config(candidates=False, candidate_block_size=0, candidate_topk_blocks=0)
    seq = Seq(tokens(TOTAL))
    assert torch.equal(play(runner(unset), seq, [0, TOTAL]), play(runner(free), seq, [0, TOTAL]))


@settings(max_examples=12)
@given(**MODELS)
def test_paged_equals_dense(cfg, seed):
    ids = tokens(TOTAL, seed)
    params, batch = by_release_name(cfg), torch.from_numpy(ids)[None]
    tables = dense.hash_tables(cfg, [i % 80 for i in range(VOCAB)]) if cfg.engram_layer_ids else None
    rows = dense.hash_rows(cfg, tables, batch) if tables else ()
    run = dense.Pass(cfg, params, 1, trace=dense.Trace())
    want = F.linear(dense.forward(run, batch, rows), params["head.weight"])[0]
    torch.testing.assert_close(play(runner(cfg), Seq(ids), [0, 30, TOTAL]), want, rtol=1e-4, atol=1e-4)
