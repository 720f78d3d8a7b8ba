"""One block: attention and experts, each between an mHC mix and post (spec section 4)."""

from torch import Tensor

from kernels.linear import rms_norm
from kernels.mhc import mhc_collapse, mhc_post
from model import attention, mhc, moe, tree
from model.batch import Batch, Carry, View
from model.cache import Address, Cache, Layout
from model.config import LayerKind, ModelConfig
from model.runtime import Runtime
from model.tree import Spec


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


def feed_forward(
    cfg: ModelConfig,
    rt: Runtime,
    k: int,
    p: BlockParams,
    x: Tensor,
    pre: Tensor,
    valid: Tensor,
    cache: Cache,
    at: Address,
) -> tuple[Tensor, Tensor]:
    """The expert half: streams [N, C, D] after attention and attention's pre-mix -> streams, pre-mix for the next layer."""
    next_pre, post, mixing = mhc.mix(cfg, rt, p.hc_ffn, x)
    v = collapsed(cfg, rt, p.ffn_norm, pre, x)
    f = moe.apply(cfg, rt, k, p.ffn, v, valid, cache.load, at.layer)
    return mhc_post(f, x, post, mixing, backend=rt.kernels.mhc_post), next_pre


def apply(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: BlockParams,
    at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> Carry:  # fmt: skip
    """One backbone layer. The attention input is collapsed with the previous layer's pre-mix (spec section 4)."""
    pre, post, mixing = mhc.mix(cfg, rt, p.hc_attn, carry.x)
    u = collapsed(cfg, rt, p.attn_norm, carry.pre, carry.x)
    o, topk_idxs, blocks = attention.apply(cfg, rt, layout, kind, p.attn, u, at, batch, view, cache, carry)
    x = mhc_post(o, carry.x, post, mixing, backend=rt.kernels.mhc_post)
    x, pre = feed_forward(cfg, rt, cfg.num_experts_per_tok, p, x, pre, view.valid, cache, at)
    return Carry(x=x, pre=pre, topk_idxs=topk_idxs, blocks=blocks)


def publish(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: BlockParams,
    at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> None:  # fmt: skip
    """Only the global rows that a source layer writes: needs no attention and no experts of it (spec section 13.1)."""
    u = collapsed(cfg, rt, p.attn_norm, carry.pre, carry.x)
    attention.publish(cfg, rt, layout, kind, p.attn, u, at, batch, view, cache)
