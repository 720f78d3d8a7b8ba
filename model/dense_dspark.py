"""The DSpark drafter over whole sequences, differentiable (spec section 9). Companion of model/dense.py.

B sequences, T tokens, M anchors of each, K = dspark_block_size, W window, D model dim, H heads, d head dim, V words.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import dense, dense_ops
from model.dense import Pass


def context(run: Pass, taps: list[Tensor]) -> Tensor:
    """The backbone's taps [B, T, D] each -> context features [B, T, D]."""
    return run.rms(run.linear(torch.cat(taps, -1), "mtp.0.main_proj"), "mtp.0.main_norm")


def draft(run: Pass, features: Tensor, anchors: Tensor, last: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Hidden rows of the blocks that begin with token ``anchors``, right after position ``last``; before norm and head.

    features [B, T, D]; anchors, last [B, M] -> [B, M, K, D] and tokens per expert of each stage [E].
    """
    cfg, size = run.cfg, run.cfg.dspark_block_size
    block = torch.full((*anchors.shape, size), cfg.dspark_noise_token_id)
    block[..., 0] = anchors
    x, a = dense.streams(run, block)
    loads = []
    for stage in range(cfg.num_nextn_predict_layers):

        def attend(u: Tensor, pre: str = f"mtp.{stage}.attn") -> Tensor:
            return attention(run, pre, u.view(*block.shape, -1), features, last).flatten(0, 2)

        x, a, load = dense.halves(run, f"mtp.{stage}", x, a, attend, cfg.dspark_num_experts_per_tok)
        loads.append(load)
    y = (a[..., None] * x.float()).sum(1).to(x.dtype)
    return y.view(*block.shape, -1), loads


def attention(run: Pass, pre: str, x: Tensor, features: Tensor, last: Tensor) -> Tensor:
    """Each block attends to the W context rows up to ``last`` and to all of itself. x [B, M, K, D] -> [B, M, K, D]."""
    cfg, (b, m, size, _) = run.cfg, x.shape
    qr = run.rms(run.linear(x, f"{pre}.wq_a"), f"{pre}.q_norm")
    q = run.linear(qr, f"{pre}.wq_b").unflatten(-1, (cfg.num_attention_heads, cfg.head_dim))
    angles = _angles(run, last[..., None] + 1 + torch.arange(size))
    q, own = _turn(q, angles, 1), _keys(run, pre, x, angles)
    there = _keys(run, pre, features, _angles(run, torch.arange(features.shape[1])[None]))
    seen = last[..., None] - torch.arange(cfg.sliding_window - 1, -1, -1)  # [B, M, W]
    rows = seen.clamp(min=0).flatten(1)[..., None].expand(-1, -1, cfg.head_dim)
    past = there.gather(1, rows).view(b, m, -1, cfg.head_dim)
    keys = torch.cat([past, own], 2)
    valid = F.pad(seen >= 0, (0, size), value=True)[:, :, None, None]
    z = torch.einsum("bmkhd,bmjd->bmhkj", q, keys).float() * cfg.head_dim**-0.5
    z = z.masked_fill(~valid, -torch.inf)
    sink = run.p[f"{pre}.attn_sink"].float().view(-1, 1, 1)
    top = torch.maximum(z.amax(-1, keepdim=True), sink).detach()
    e = (z - top).exp()
    p = e / (e.sum(-1, keepdim=True) + (sink - top).exp())
    o = _turn(torch.einsum("bmhkj,bmjd->bmkhd", p.to(x.dtype), keys), angles, -1)
    return dense.project_out(run, pre, o.flatten(0, 1)).view_as(x)


def _angles(run: Pass, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [*positions, rope/2] of ratio-0 layers."""
    flat = dense_ops.rope_angles(run.cfg, positions.flatten(), False)
    cos, sin = (f.view(*positions.shape, -1) for f in flat)
    return cos, sin


def _turn(x: Tensor, angles: tuple[Tensor, Tensor], sign: int) -> Tensor:
    """RoPE on the tail of x, forward or back; angles have x's leading dims, or lack its heads'."""
    cos, sin = (f.unsqueeze(-2) if f.dim() < x.dim() else f for f in angles)
    r = cos.shape[-1]
    even, odd = x[..., -2 * r :: 2].float(), x[..., -2 * r + 1 :: 2].float()
    sin = sin * sign
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., : -2 * r], turned.to(x.dtype)], -1)


def _keys(run: Pass, pre: str, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    return run.numerics.act(_turn(run.rms(run.linear(x, f"{pre}.wkv"), f"{pre}.kv_norm"), angles, 1))


def logits(run: Pass, y: Tensor, previous: Tensor) -> Tensor:
    """y [..., K, D] and the token before each row's prediction [..., K] -> fp32 [..., K, V], Markov term included."""
    last = f"mtp.{run.cfg.num_nextn_predict_layers - 1}"
    base = F.linear(run.rms(y, f"{last}.norm").float(), run.p["head.weight"].float())
    memory = F.embedding(previous, run.p[f"{last}.markov_head.embed.weight"])
    return base + F.linear(memory.float(), run.p[f"{last}.markov_head.head.weight"].float())


def confidence(run: Pass, y: Tensor, previous: Tensor) -> Tensor:
    """Raw logit of each row's acceptance, given that the rows before it were accepted: fp32 [..., K]."""
    last = f"mtp.{run.cfg.num_nextn_predict_layers - 1}"
    memory = F.embedding(previous, run.p[f"{last}.markov_head.embed.weight"])
    weight = run.p[f"{last}.confidence_head.proj.weight"]
    return F.linear(torch.cat([y, memory], -1).float(), weight.float())[..., 0]
