"""DSpark drafter (spec section 9): a few window-only stages that draft a block of tokens in one pass.

N rows of a backbone step, B sequences, k draft block, D model dim, V vocabulary, R Markov rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.linear import linear, quant_linear, rms_norm
from kernels.mhc import mhc_collapse, mhc_post
from kernels.rows import store_window
from model import attention, block, mhc, moe, tree
from model.batch import View, rope
from model.cache import Address, Cache, Layout
from model.config import LayerKind, ModelConfig
from model.runtime import Runtime
from model.tree import Quantized, Spec
from parallel.expert import Placement


@tree.node
class DraftBatch:
    """What to draft after: the anchor is the sequence's newest token, which the backbone has not processed yet."""

    anchors: Tensor  # [B] token ids
    positions: Tensor  # [B] the anchor's position, -1 padding
    slots: Tensor  # [B] cache slots
    floors: Tensor  # [B] lowest position whose context row is in the ring
    inv_temperature: Tensor  # [B] fp32
    noise: Tensor  # [B, k, V] fp32 added to scaled logits: the noise the verifier will use at the same positions


@tree.node
class BlockView:
    """What the rows of the block see, B * k rows."""

    rope: tuple[Tensor, Tensor]  # cos, sin [B * k, rd/2]
    entries: Tensor  # [B * k, W + k]
    positions: Tensor  # [B * k], -1 padding


@tree.node
class Draft:
    tokens: Tensor  # [B, k] row i is for position anchor + 1 + i
    logits: Tensor  # [B, k, V] fp32 with the Markov bias
    confidence: Tensor  # [B, k] fp32 raw


@tree.node
class MarkovParams:
    embed: Tensor  # [V, R]
    head: Tensor  # [V, R] fp32


@tree.node
class ConfidenceParams:
    proj: Tensor  # [1, D + R] fp32


@tree.node
class StageParams:
    """A stage: the first projects the backbone's taps, the last carries the heads."""

    block: block.BlockParams
    main_proj: Quantized | None  # [D, taps * D]
    main_norm: Tensor | None  # [D]
    norm: Tensor | None  # [D]
    markov_head: MarkovParams | None
    confidence_head: ConfidenceParams | None


def specs(cfg: ModelConfig) -> tuple[StageParams, ...]:
    d, r, v = cfg.hidden_size, cfg.dspark_markov_rank, cfg.vocab_size
    taps = len(cfg.dspark_target_layer_ids)
    norm = Spec((d,), init="ones")
    stages = []
    for s in range(cfg.num_nextn_predict_layers):
        first, last = s == 0, s == cfg.num_nextn_predict_layers - 1
        stages.append(
            StageParams(
                block=block.specs(cfg, LayerKind(), cfg.dspark_n_routed_experts),
                main_proj=Spec((d, taps * d), "fp8", scale=(taps * d) ** -0.5) if first else None,
                main_norm=norm if first else None,
                norm=norm if last else None,
                markov_head=MarkovParams(
                    embed=Spec((v, r), scale=r**-0.5), head=Spec((v, r), promote=True, scale=r**-0.5)
                )
                if last
                else None,
                confidence_head=ConfidenceParams(Spec((1, d + r), promote=True, scale=(d + r) ** -0.5))
                if last
                else None,
            )
        )
    return tuple(stages)


def absorb(
    cfg: ModelConfig, rt: Runtime, p: tuple[StageParams, ...], at: tuple[Address, ...],
    taps: tuple[Tensor, ...], view: View, cache: Cache,
) -> None:  # fmt: skip
    """Fill each stage's ring with context rows of this step's tokens. taps: inputs [N, D] of the target layers."""
    k, first = rt.kernels, p[0]
    c = quant_linear(torch.cat(taps, -1), first.main_proj.weight, first.main_proj.scale, rt.qat, backend=k.quant_linear)
    c = rms_norm(c, first.main_norm, cfg.rms_norm_eps, backend=k.rms_norm)
    for stage, where in zip(p, at, strict=True):
        key = attention.window_key(cfg, rt, stage.block.attn, c, view.window_rope)
        store_window(cache.rings, view.ring_rows + where.ring, key, rt.qat, backend=k.store_window)


def block_entries(cfg: ModelConfig, layout: Layout, batch: DraftBatch) -> Tensor:
    """[B * k, W + k] entries of the block's rows: the sequence's last W context rows, then all k rows of the block."""
    b, k, w = batch.anchors.shape[0], cfg.dspark_block_size, cfg.sliding_window
    keys = batch.positions.unsqueeze(-1) - w + torch.arange(w, device=batch.anchors.device)
    seen = (keys >= 0) & (keys >= batch.floors.unsqueeze(-1))
    ring = torch.where(seen, batch.slots.unsqueeze(-1) * layout.slot_rings + keys % cfg.ring_size, -1)
    fresh = -2 - torch.arange(b * k, device=keys.device).view(b, k)
    entries = torch.where(batch.positions.unsqueeze(-1) >= 0, torch.cat((ring, fresh), 1), -1)
    return entries.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)


def open_block(
    cfg: ModelConfig, layout: Layout, freqs: Tensor, embed: Tensor, batch: DraftBatch
) -> tuple[Tensor, Tensor, BlockView]:
    """The block's streams [B * k, C, D] (anchor, then noise tokens), one-hot pre-mix, and what its rows see."""
    b, k = batch.anchors.shape[0], cfg.dspark_block_size
    noise = torch.full((b, k - 1), cfg.dspark_noise_token_id, dtype=torch.int64, device=embed.device)
    ids = torch.cat((batch.anchors.unsqueeze(-1), noise), 1).flatten()
    x = embed[ids].unsqueeze(1).repeat(1, cfg.hc_mult, 1)
    pre = x.new_zeros((b * k, cfg.hc_mult), dtype=torch.float32)
    pre[:, 0] = 1
    positions = (batch.positions.unsqueeze(-1) + torch.arange(k, device=embed.device)).flatten()
    known = torch.where((batch.positions >= 0).repeat_interleave(k), positions, -1)
    return x, pre, BlockView(rope(positions, freqs), block_entries(cfg, layout, batch), known)


def attention_half(
    cfg: ModelConfig, rt: Runtime, layout: Layout, norm: Tensor, p: attention.AttentionParams,
    mixed: mhc.Mixed, at: Address, view: BlockView, cache: Cache, pre: Tensor, x: Tensor,
) -> Tensor:  # fmt: skip
    """Attention of a stage over its context ring and the whole block; the block's rows are written to no ring."""
    u = block.collapsed(cfg, rt, norm, pre, x)
    qr = quant_linear(u, p.wq_a.weight, p.wq_a.scale, rt.qat, backend=rt.kernels.quant_linear)
    qr = rms_norm(qr, p.q_norm, cfg.rms_norm_eps, backend=rt.kernels.rms_norm)
    key = attention.window_key(cfg, rt, p, u, view.rope)
    o = attention.attend(cfg, rt, layout, p, qr, key, view.rope, view.entries, None, at, cache)
    return mhc_post(o, x, mixed.post, mixed.mixing, backend=rt.kernels.mhc_post)


def close_block(
    cfg: ModelConfig, rt: Runtime, p: StageParams, head: Tensor, batch: DraftBatch, pre: Tensor, x: Tensor
) -> Draft:
    """Collapse the last stage, and draft token by token: base logits plus the Markov bias of the token before."""
    b, k = batch.anchors.shape[0], cfg.dspark_block_size
    y = mhc_collapse(pre, x, backend=rt.kernels.mhc_collapse)
    base = rms_norm(y, p.norm, cfg.rms_norm_eps, backend=rt.kernels.rms_norm)
    base = linear(base.float(), head, backend=rt.kernels.linear)
    return chain(rt, p, batch, base.view(b, k, -1), y.view(b, k, -1))


def chain(rt: Runtime, p: StageParams, batch: DraftBatch, base: Tensor, y: Tensor) -> Draft:
    """Draft token by token: base logits [B, k, V] plus the Markov bias of the token before; y [B, k, D]."""
    prev, tokens, biased, confidence = batch.anchors, [], [], []
    for i in range(base.shape[1]):
        before = p.markov_head.embed[prev].float()
        row = base[:, i] + linear(before, p.markov_head.head, backend=rt.kernels.linear)
        sure = linear(torch.cat((y[:, i].float(), before), -1), p.confidence_head.proj, backend=rt.kernels.linear)
        prev = (row * batch.inv_temperature.unsqueeze(-1) + batch.noise[:, i]).argmax(-1)
        tokens.append(prev)
        biased.append(row)
        confidence.append(sure.squeeze(-1))
    return Draft(tokens=torch.stack(tokens, 1), logits=torch.stack(biased, 1), confidence=torch.stack(confidence, 1))


def draft(
    jit: Callable, cfg: ModelConfig, rt: Runtime, layout: Layout, p: tuple[StageParams, ...],
    places: tuple[Placement, ...], at: tuple[Address, ...], freqs: Tensor, embed: Tensor, head: Tensor,
    batch: DraftBatch, cache: Cache,
) -> Draft:  # fmt: skip
    """Draft k tokens for each sequence: every stage sees context rows <= anchor - 1 and all k rows of the block."""
    x, pre, view = jit(open_block, cfg, layout)(freqs, embed, batch)
    mix, attend = jit(mhc.mix, cfg, rt), jit(attention_half, cfg, rt, layout)
    experts = cfg.dspark_num_experts_per_tok, cfg.dspark_n_routed_experts
    for s, place, where in zip(p, places, at, strict=True):
        b = s.block
        first = mix(b.hc_attn, x)
        x = attend(b.attn_norm, b.attn, first, where, view, cache, pre, x)
        second = mix(b.hc_ffn, x)
        think = jit(block.expert_half, cfg, moe.fitted(rt, b.ffn, x.shape[0]), *experts)
        x = think(b.ffn_norm, b.ffn, place, first.pre, second, x, view.positions, cache.load, where.layer)
        pre = second.pre
    return jit(close_block, cfg, rt)(p[-1], head, batch, pre, x)
