"""One block: attention and experts, each between an mHC mix and post (spec section 4)."""

from collections.abc import Callable

from torch import Tensor

from kernels.linear import rms_norm
from kernels.mhc import mhc_collapse, mhc_post
from model import attention, mhc, moe, tree
from model.batch import Batch, Carry, View
from model.cache import Address, Cache, Layout
from model.config import LayerKind, ModelConfig
from model.runtime import Runtime
from model.tree import Spec
from parallel.expert import Placement


@tree.node
class BlockParams:
    attn_norm: Tensor  # [D]
    ffn_norm: Tensor  # [D]
    hc_attn: mhc.MixParams
    hc_ffn: mhc.MixParams
    attn: attention.AttentionParams
    ffn: moe.MoEParams


def specs(cfg: ModelConfig, kind: LayerKind, experts: int) -> BlockParams:
    norm = Spec((cfg.hidden_size,), init="ones")
    return BlockParams(
        attn_norm=norm,
        ffn_norm=norm,
        hc_attn=mhc.specs(cfg),
        hc_ffn=mhc.specs(cfg),
        attn=attention.specs(cfg, kind),
        ffn=moe.specs(cfg, experts),
    )


def collapsed(cfg: ModelConfig, rt: Runtime, norm: Tensor, pre: Tensor, x: Tensor) -> Tensor:
    """A half-block's normed input [N, D] from the streams x [N, C, D] and pre-mix [N, C]."""
    u = mhc_collapse(pre, x, backend=rt.kernels.mhc_collapse)
    return rms_norm(u, norm, cfg.rms_norm_eps, backend=rt.kernels.rms_norm)


def attention_half(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, norm: Tensor, p: attention.AttentionParams,
    mixed: mhc.Mixed, at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Streams [N, C, D] after attention, topk_idxs, candidate blocks."""
    u = collapsed(cfg, rt, norm, carry.pre, carry.x)
    o, topk_idxs, blocks = attention.apply(cfg, rt, layout, kind, p, u, at, batch, view, cache, carry)
    return mhc_post(o, carry.x, mixed.post, mixed.mixing, backend=rt.kernels.mhc_post), topk_idxs, blocks


def expert_half(
    cfg: ModelConfig, rt: Runtime, k: int, experts: int, norm: Tensor, p: moe.MoEParams, place: Placement,
    pre: Tensor, mixed: mhc.Mixed, x: Tensor, positions: Tensor, load: Tensor, layer: Tensor,
) -> Tensor:  # fmt: skip
    """Streams [N, C, D] after the experts, from those after attention and attention's pre-mix [N, C]."""
    v = collapsed(cfg, rt, norm, pre, x)
    f = moe.apply(cfg, rt, k, p, place, v, positions, load, layer)
    return mhc_post(f, x, mixed.post, mixed.mixing, backend=rt.kernels.mhc_post)


def narrow_half(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, norm: Tensor, p: attention.AttentionParams,
    mixed: mhc.Mixed, key: Tensor, window: Tensor, ring_rows: Tensor, at: Address, batch: Batch, view: View,
    cache: Cache, carry: Carry,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `attention_half` for some rows of the step, which see window keys [N, hd] of all its rows."""
    u = collapsed(cfg, rt, norm, carry.pre, carry.x)
    o, topk_idxs, blocks = attention.read(
        cfg, rt, layout, kind, p, u, key, window, ring_rows, at, batch, view, cache, carry
    )
    return mhc_post(o, carry.x, mixed.post, mixed.mixing, backend=rt.kernels.mhc_post), topk_idxs, blocks


def apply(
    jit: Callable, cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: BlockParams, place: Placement,
    at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> Carry:  # fmt: skip
    """One backbone layer in four calls, each a graph that all layers of its kind share (``jit``: model/transformer.py).

    The attention input is collapsed with the previous layer's pre-mix (spec section 4).
    """
    first = jit(mhc.mix, cfg, rt)(p.hc_attn, carry.x)
    attend = jit(attention_half, cfg, rt, layout, kind)
    x, topk_idxs, blocks = attend(p.attn_norm, p.attn, first, at, batch, view, cache, carry)
    return think(jit, cfg, rt, p, place, first, x, topk_idxs, blocks, at, view, cache)


def narrow(
    jit: Callable, cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: BlockParams, place: Placement,
    at: Address, batch: Batch, view: View, cache: Cache, carry: Carry, rows: Tensor, kept: tuple[Batch, View, Carry],
) -> Carry:  # fmt: skip
    """A layer whose keys are made of all rows of the step, its outputs of ``rows`` only (spec 13.3, exact form).

    ``kept`` describes these; each sees the whole window that it would see in `apply`.
    """
    keys = jit(block_keys, cfg, rt, layout, kind)
    key = keys(p.attn_norm, p.attn, at, batch, view, cache, carry)
    late, sees, carry = kept
    first = jit(mhc.mix, cfg, rt)(p.hc_attn, carry.x)
    attend = jit(narrow_half, cfg, rt, layout, kind)
    x, topk_idxs, blocks = attend(
        p.attn_norm, p.attn, first, key, view.window[rows], view.ring_rows, at, late, sees, cache, carry
    )
    return think(jit, cfg, rt, p, place, first, x, topk_idxs, blocks, at, sees, cache)


def think(
    jit: Callable, cfg: ModelConfig, rt: Runtime, p: BlockParams, place: Placement, first: mhc.Mixed, x: Tensor,
    topk_idxs: Tensor, blocks: Tensor, at: Address, view: View, cache: Cache,
) -> Carry:  # fmt: skip
    """The second half of a layer: experts on the streams x [N, C, D] that attention gave."""
    second = jit(mhc.mix, cfg, rt)(p.hc_ffn, x)
    fitted = moe.fitted(rt, p.ffn, x.shape[0])
    experts = jit(expert_half, cfg, fitted, cfg.num_experts_per_tok, cfg.n_routed_experts)
    x = experts(p.ffn_norm, p.ffn, place, first.pre, second, x, view.positions, cache.load, at.layer)
    return Carry(x=x, pre=second.pre, topk_idxs=topk_idxs, blocks=blocks)


def block_keys(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, norm: Tensor, p: attention.AttentionParams,
    at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> Tensor:  # fmt: skip
    """A layer's window keys [N, hd] of every row; writes the global rows of a source."""
    u = collapsed(cfg, rt, norm, carry.pre, carry.x)
    return attention.publish_keys(cfg, rt, layout, kind, p, u, at, batch, view, cache)


def publish(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, norm: Tensor, p: attention.AttentionParams,
    at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> None:  # fmt: skip
    """Only the global rows that a source layer writes: needs no attention and no experts of it (spec section 13.1)."""
    u = collapsed(cfg, rt, norm, carry.pre, carry.x)
    attention.publish(cfg, rt, layout, kind, p, u, at, batch, view, cache)
