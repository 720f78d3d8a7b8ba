"""Window + compressed sparse attention with sinks (spec sections 5 and 6.1).

N rows, D model dim, H heads, hd head dim, rd RoPE dims, G output groups.
"""

import torch
from torch import Tensor

from kernels.attention import rotate, sparse_attention
from kernels.index import latent_slots
from kernels.linear import grouped_linear, linear, quant_linear, rms_norm
from kernels.quant import fake_fp8
from kernels.rows import store_kv, store_window
from model import indexer, tree
from model.batch import Batch, Carry, View
from model.cache import Address, Cache, Layout
from model.config import LayerKind, ModelConfig
from model.runtime import Runtime
from model.tree import Quantized, Spec


@tree.node
class CompressorParams:
    """Latents from tokens; ``wgate`` only where a group spans two tokens (fp32 there, else bf16)."""

    wkv: Tensor  # [hd, D]
    wgate: Tensor | None  # [hd, D]
    norm: Tensor  # [hd]


@tree.node
class AttentionParams:
    wq_a: Quantized  # [q_lora, D]
    q_norm: Tensor  # [q_lora]
    wq_b: Quantized  # [H * hd, q_lora]
    wkv: Quantized  # [hd, D]
    kv_norm: Tensor  # [hd]
    wo_a: Quantized  # [G * o_lora, H * hd / G]
    wo_b: Quantized  # [D, G * o_lora]
    attn_sink: Tensor  # [H] fp32
    compressor: CompressorParams | None
    indexer: indexer.IndexerParams | None


def specs(cfg: ModelConfig, kind: LayerKind) -> AttentionParams:
    d, hd, ql = cfg.hidden_size, cfg.head_dim, cfg.q_lora_rank
    h, g, ol = cfg.num_attention_heads, cfg.o_groups, cfg.o_lora_rank
    compressor = None
    if kind.ratio:
        two = kind.ratio == 2
        latent = Spec((hd, d), promote=two, scale=d**-0.5)
        compressor = CompressorParams(wkv=latent, wgate=latent if two else None, norm=Spec((hd,), init="ones"))
    return AttentionParams(
        wq_a=Spec((ql, d), "fp8", scale=d**-0.5),
        q_norm=Spec((ql,), init="ones"),
        wq_b=Spec((h * hd, ql), "fp8", scale=ql**-0.5),
        wkv=Spec((hd, d), "fp8", scale=d**-0.5),
        kv_norm=Spec((hd,), init="ones"),
        wo_a=Spec((g * ol, h * hd // g), "fp8", scale=(h * hd // g) ** -0.5),
        wo_b=Spec((d, g * ol), "fp8", scale=(g * ol) ** -0.5),
        attn_sink=Spec((h,), "f32", bare=True, init="zeros"),
        compressor=compressor,
        indexer=indexer.specs(cfg, kind),
    )


def latents(
    cfg: ModelConfig, rt: Runtime, p: CompressorParams, x: Tensor, at: Address, view: View, cache: Cache
) -> Tensor:
    """Compressed latents [N, hd] before RoPE (spec section 6.1): row t holds that of the group which token t completes.

    At ratio 2 writes each row's value and gate into ``cache.tails``; rows that complete no group hold numbers that
    nobody reads.
    """
    k = rt.kernels
    if p.wgate is None:
        latent = linear(x, p.wkv, backend=k.linear)
    else:
        value, gate = (linear(x.float(), w, backend=k.linear) for w in (p.wkv, p.wgate))
        state = torch.cat((value, gate), -1)
        fresh = state[(-2 - view.tail_prev).clamp(min=0)]
        old = cache.tails[(view.tail_prev + at.tail).clamp(min=0)]
        before = torch.where((view.tail_prev < 0).unsqueeze(-1), fresh, old)
        cache.tails[view.tail_rows + at.tail] = state
        (v0, g0), (v1, g1) = before.chunk(2, -1), state.chunk(2, -1)
        share = torch.sigmoid(g1 - g0)  # softmax over the two tokens of the group
        latent = (v0 * (1 - share) + v1 * share).to(x.dtype)
    return rms_norm(latent, p.norm, cfg.rms_norm_eps, backend=k.rms_norm)


def publish(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: AttentionParams, x: Tensor,
    at: Address, batch: Batch, view: View, cache: Cache,
) -> None:  # fmt: skip
    """Write this source's global rows, latents and index keys, of every group that the step completes. x [N, D]."""
    latent = latents(cfg, rt, p.compressor, x, at, view, cache)
    rope = view.compress_rope if kind.ratio == 1 else view.pair_rope
    page, offset = batch.slot_mapping // layout.page_size, batch.slot_mapping % layout.page_size
    complete = (batch.positions + 1) % kind.ratio == 0
    slots = torch.where(complete, page * (layout.page_size // kind.ratio) + offset // kind.ratio, 0)
    indexer.publish(cfg, rt, layout, p.indexer, latent, rope, slots, at, cache)
    row = rotate(latent, *rope)
    store_kv(cache.pages, slots, at.planes, layout.stride, row, rt.qat, backend=rt.kernels.store_kv)


def apply(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: AttentionParams, x: Tensor,
    at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [N, D] normed -> output [N, D], topk_idxs [N, K], candidate blocks.

    Writes the layer's window ring, and global rows if it is a source.
    """
    key = publish_keys(cfg, rt, layout, kind, p, x, at, batch, view, cache)
    return read(cfg, rt, layout, kind, p, x, key, view.window, view.ring_rows, at, batch, view, cache, carry)


def publish_keys(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: AttentionParams, x: Tensor,
    at: Address, batch: Batch, view: View, cache: Cache,
) -> Tensor:  # fmt: skip
    """Window keys [N, hd] of rows x [N, D]; writes their global rows if the layer is a source."""
    if kind.ratio:
        publish(cfg, rt, layout, kind, p, x, at, batch, view, cache)
    return window_key(cfg, rt, p, x, view.compress_rope if kind.reads else view.window_rope)


def read(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: AttentionParams, x: Tensor, key: Tensor,
    window: Tensor, ring_rows: Tensor, at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output [M, D], topk_idxs, candidate blocks of query rows x [M, D], described by ``batch`` and ``view``.

    ``window`` [M, W] are entries into the step's ``key`` [N, hd], of M rows or more, and the ring; writes the keys to
    ``ring_rows`` [N] once the older ones are read.
    """
    k = rt.kernels
    qr = quant_linear(x, p.wq_a.weight, p.wq_a.scale, rt.qat, backend=k.quant_linear)
    qr = rms_norm(qr, p.q_norm, cfg.rms_norm_eps, backend=k.rms_norm)
    topk_idxs, blocks = carry.topk_idxs, carry.blocks
    if kind.index:
        topk_idxs, blocks = indexer.apply(cfg, rt, layout, kind, p.indexer, x, qr, at, batch, view, cache, carry)
    slots = None
    if kind.reads:
        picked = latent_slots(batch.page_tables[batch.seqs], topk_idxs.clamp(min=0), at.planes[4])
        slots = torch.where(topk_idxs >= 0, picked, -1)
    rope = view.compress_rope if kind.reads else view.window_rope
    out = attend(cfg, rt, layout, p, qr, key, rope, window, slots, at, cache)
    store_window(cache.rings, ring_rows + at.ring, key, rt.qat, backend=k.store_window)
    return out, topk_idxs, blocks


def window_key(cfg: ModelConfig, rt: Runtime, p: AttentionParams, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Window latents [N, hd] after RoPE, before quantisation: key and value in one (spec section 5 step 2)."""
    key = quant_linear(x, p.wkv.weight, p.wkv.scale, rt.qat, backend=rt.kernels.quant_linear)
    return rotate(rms_norm(key, p.kv_norm, cfg.rms_norm_eps, backend=rt.kernels.rms_norm), *rope)


def attend(
    cfg: ModelConfig, rt: Runtime, layout: Layout, p: AttentionParams, qr: Tensor, key: Tensor,
    rope: tuple[Tensor, Tensor], window: Tensor, slots: Tensor | None, at: Address, cache: Cache,
) -> Tensor:  # fmt: skip
    """Queries of qr [M, q_lora] over ``window`` entries and cache ``slots``; output projection to [M, D].

    Rows of this step come from ``key`` [N, hd], older ones from the ring, which must not hold this step's yet.
    """
    n, k = qr.shape[0], rt.kernels
    q = quant_linear(qr, p.wq_b.weight, p.wq_b.scale, rt.qat, backend=k.quant_linear)
    entries = torch.where(window >= 0, window + at.ring, window)
    seen = fake_fp8(key) if rt.qat else key
    o = sparse_attention(
        q.view(n, cfg.num_attention_heads, cfg.head_dim), *rope, p.attn_sink, seen, cache.rings, entries,
        cache.pages, slots, at.planes, layout.stride, backend=k.sparse_attention,
    )  # fmt: skip
    o = grouped_linear(o.reshape(n, cfg.o_groups, -1), p.wo_a.weight, p.wo_a.scale, backend=k.grouped_linear)
    return quant_linear(o, p.wo_b.weight, p.wo_b.scale, rt.qat, backend=k.quant_linear)
