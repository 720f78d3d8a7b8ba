"""The arithmetic of the dense forward, spelled out. N rows, S streams, D model dim, H heads, T tokens, C entries."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim, in fp32, back in x's type."""
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def mix(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of a half-block, fp32 (spec section 4). x [N, S, D] -> P [N, S], Q [N, S], C [N, S, S]."""
    s, f = x.shape[1], x.flatten(1).float()
    m = F.linear(f, fn) * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-20)
    p = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + eps
    q = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    c = (m[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(1, (s, s)).softmax(-1) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(rounds - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return p, q, c


def collapse(a: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Streams to one row by the pre-mix, then RMS norm. a [N, S], x [N, S, D] -> [N, D]."""
    return rms((a[..., None] * x.float()).sum(1).to(x.dtype), weight, eps)


def post(out: Tensor, x: Tensor, q: Tensor, c: Tensor) -> Tensor:
    """A half-block's output into the streams. out [N, D], x [N, S, D], q [N, S], c [N, S source, S] -> [N, S, D]."""
    mixed = (c[..., None] * x.float()[:, :, None]).sum(1)
    return (q[..., None] * out.float()[:, None] + mixed).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the last 2R dims of x [B, T, ..., d] by cos, sin [T, R]: neighbouring dims are one complex number."""
    r = cos.shape[1]
    shape = (1, x.shape[1]) + (1,) * (x.dim() - 3) + (r,)
    cos, sin = cos.view(shape), sin.view(shape)
    head, tail = x[..., : -2 * r], x[..., -2 * r :].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([head, turned.to(x.dtype)], -1)


def attend(q: Tensor, k: Tensor, latent: Tensor | None, selection: Tensor | None, sink: Tensor, window: int) -> Tensor:
    """One softmax over window keys, selected compressed keys and the sink (spec section 5, step 4).

    q [B, T, H, d]; k [B, T, d]; latent [B, C, d] and selection [B, T, C] bool, or None; sink [H]. -> [B, T, H, d]
    """
    t, h = q.shape[1], q.shape[2]
    ages = torch.arange(t)[:, None] - torch.arange(t)
    allowed, keys = ((ages >= 0) & (ages < window))[None], k
    if latent is not None:
        keys = torch.cat([k, latent], 1)
        batch = max(selection.shape[0], 1)
        allowed = torch.cat([allowed.expand(batch, -1, -1), selection], 2)
    z = torch.einsum("bthd,bkd->bhtk", q.float(), keys.float()) * q.shape[-1] ** -0.5
    z = z.masked_fill(~allowed[:, None], -torch.inf)
    top = z.amax(-1, keepdim=True)
    e = (z - top).exp()
    total = e.sum(-1, keepdim=True) + (sink.float().view(1, h, 1, 1) - top).exp()
    out = torch.einsum("bhtk,bkd->bhtd", e.to(q.dtype).float(), keys.float()) / total
    return out.transpose(1, 2).to(q.dtype)


def swiglu(gate: Tensor, up: Tensor, weight: Tensor, limit: float) -> Tensor:
    """silu(gate) * up, clamped, times the routing weight, in fp32. gate, up [N, F]; weight [N] -> [N, F]."""
    g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return (F.silu(g) * u * weight[:, None]).to(gate.dtype)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, stacks: list[Tensor], limit: float, act: Callable[[Tensor], Tensor]
) -> Tensor:
    """Each row through its chosen experts, summed in slot order, fp32 (spec section 7).

    x [N, D], quantised; ids, weights [N, k]; stacks w1, w3 [E, F, D] and w2 [E, D, F]; act quantises w2's input.
    """
    order = ids.flatten().argsort(stable=True)
    sizes = torch.bincount(ids.flatten(), minlength=stacks[0].shape[0]).tolist()
    rows = x[order // ids.shape[1]].split(sizes)
    gate, up = (torch.cat([F.linear(r, w) for r, w in zip(rows, s, strict=True)]) for s in stacks[:2])
    hidden = act(swiglu(gate, up, weights.flatten()[order], limit)).split(sizes)
    y = torch.cat([F.linear(r, w) for r, w in zip(hidden, stacks[2], strict=True)])
    return y[order.argsort()].unflatten(0, ids.shape).float().sum(1)


def engram_gate(x: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """x [N, S, D] plus the memory's value, gated per stream by its key. kv [N, S + 1, D]: S keys, one value."""
    f, key, value = x.float(), kv[:, :-1].float(), kv[:, -1:].float()
    d = (f * (q_weight.float() * k_weight.float()) * key).sum(-1, keepdim=True) * x.shape[-1] ** -0.5
    for norm in (f, key):
        d = d * torch.rsqrt(norm.square().mean(-1, keepdim=True) + eps)
    gate = torch.sigmoid(torch.copysign(d.abs().clamp(min=1e-6).sqrt(), d))
    return (f + gate * value).to(x.dtype)


def rope_angles(cfg: ModelConfig, positions: Tensor, compressed: bool) -> tuple[Tensor, Tensor]:
    """cos and sin [T, rope/2] in fp32, YaRN where a layer reads compressed KV (spec 5.1)."""
    half = cfg.qk_rope_head_dim // 2
    base = cfg.compress_rope_theta if compressed else cfg.rope_theta
    freqs = base ** -(torch.arange(half, dtype=torch.float32) / half)
    if compressed:
        y = cfg.rope_scaling

        def dim_of(rotations: float) -> float:
            wave = y.original_max_position_embeddings / (2 * math.pi * rotations)
            return cfg.qk_rope_head_dim * math.log(wave) / (2 * math.log(base))

        low = max(math.floor(dim_of(y.beta_fast)), 0)
        high = min(math.ceil(dim_of(y.beta_slow)), cfg.qk_rope_head_dim - 1)
        ramp = ((torch.arange(half) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freqs = freqs / y.factor * ramp + freqs * (1 - ramp)
    angles = positions.float()[:, None] * freqs
    return angles.cos(), angles.sin()
