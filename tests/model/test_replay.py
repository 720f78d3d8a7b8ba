"""Bounded replay (spec section 13): what the last layers of a trimmed prefill leave alone, and what windows may see."""

import pytest
import torch
from torch import Tensor

from kernels.index import latent_slots
from kernels.rows import read_rows
from model.batch import window_entries
from model.pack import pack
from model.transformer import Trim
from serve.runner import Runner
from tests.small import PAGE, VOCAB, Seq, config, play, runner, step, tokens

FORMS = [("fp32", "plain"), ("qat", "packed")]
CFG = config()  # layers 0-5, sources 1 and 3
forms = pytest.mark.parametrize("form", FORMS, ids="-".join)
cuts = pytest.mark.parametrize("layer", [CFG.last_source, CFG.last_source + 1])


def trimmed(r: Runner, seq: Seq, total: int, layer: int) -> Tensor:
    """Logits [V] of the last token of a prefill whose layers from ``layer`` on run on its last window of rows."""
    first = max(0, total - CFG.sliding_window)
    batch = r.pack([seq.span(first, total, floor=first)])
    rows = torch.zeros(len(batch.tokens), dtype=torch.int64)
    rows[: total - first] = torch.arange(first, total)
    return r.step([seq.span(0, total)], torch.tensor([total - 1 - first]), Trim(layer, rows, batch))[0][0]


@cuts
@forms
def test_global_rows_are_those_of_the_whole_prefill(form, layer):
    seq, (whole, cut) = Seq(tokens(70)), (runner(CFG, *form) for _ in range(2))
    want = play(whole, seq, [0, 70])[-1]
    got = trimmed(cut, seq, 70, layer)
    beyond = whole.model.layout.stride  # page 0 is scratch
    assert torch.equal(cut.cache.pages[beyond:], whole.cache.pages[beyond:])
    assert got.isfinite().all() and not torch.equal(got, want), "nothing was trimmed"


@cuts
@forms
@pytest.mark.parametrize("total", [1, 5, CFG.sliding_window])
def test_prompts_within_the_window_are_untouched(form, layer, total):
    seq = Seq(tokens(total + 3))
    whole, cut = (runner(CFG, *form) for _ in range(2))
    assert torch.equal(trimmed(cut, seq, total, layer), play(whole, seq, [0, total])[-1])
    after = [play(r, seq, [total, total + 1, total + 3]) for r in (whole, cut)]
    assert torch.equal(*after)


@cuts
def test_decode_goes_on_from_a_trimmed_prefill(layer):
    """Approximate by design, yet the same model: most of the logits' energy stays."""
    seq = Seq(tokens(73))
    whole, cut = runner(CFG), runner(CFG)
    play(whole, seq, [0, 70])
    trimmed(cut, seq, 70, layer)
    want, got = (play(r, seq, [70, 71, 73]) for r in (whole, cut))
    assert got.isfinite().all()
    assert (got - want).square().mean() < 0.5 * want.square().mean()


def test_the_window_entries_of_a_row_stop_at_the_floor():
    layout = runner(CFG).model.layout
    batch = pack([Seq(tokens(40)).span(30, 40, floor=28)], PAGE)
    seen = window_entries(CFG, batch, layout) != -1
    assert seen.sum(1).tolist() == [3, 4, 5, 6, 7, 8, 8, 8, 8, 8] + [0] * 6
    assert CFG.sliding_window == 8


@pytest.mark.parametrize("floor", [0, 20])
def test_rows_below_the_floor_are_not_read(floor):
    """With the rings gone, only a floor at the first row of the step keeps their NaN out."""
    seq, r = Seq(tokens(30)), runner(CFG)
    play(r, seq, [0, 20])
    r.cache.rings[r.model.layout.slot_rings :] = torch.nan
    assert step(r, seq.span(20, 30, floor=floor))[0].isfinite().all().item() == (floor == 20)


def global_rows(r: Runner, seq: Seq, layer: int, count: int) -> Tensor:
    """Latents and index keys [count, hd + Di] of a source layer."""
    m, ratio = r.model, CFG.compress_ratios[layer]
    slots = latent_slots(torch.tensor(seq.pages), torch.arange(count), PAGE // ratio)
    where = (r.cache.pages, slots, m.addresses[layer].planes, m.layout.stride)
    latents = read_rows(*where, CFG.head_dim, "nvfp4", 0, m.rt.dtype)
    return torch.cat((latents, read_rows(*where, CFG.index_head_dim, "mxfp4", 2, m.rt.dtype)), 1)


@forms
@pytest.mark.parametrize("write_from", [0, 40, 41])
def test_cached_rows_are_not_rewritten(form, write_from):
    """Other tokens are replayed over 30..49: only groups that complete at ``write_from`` or later may change."""
    seq, r = Seq(tokens(50)), runner(CFG, *form)
    play(r, seq, [0, 50])
    before = {layer: global_rows(r, seq, layer, 50 // CFG.compress_ratios[layer]) for layer in CFG.kv_source_layer_ids}
    other = Seq((seq.tokens + 7) % VOCAB, seq.slot, seq.pages)
    step(r, other.span(30, 50, floor=30, write_from=write_from))
    for layer, old in before.items():
        ratio = CFG.compress_ratios[layer]
        changed = (global_rows(r, seq, layer, len(old)) != old).any(1).nonzero().flatten().tolist()
        first = max(30, write_from)
        assert changed == [j for j in range(len(old)) if (j + 1) * ratio - 1 >= first]
