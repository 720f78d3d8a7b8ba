"""Sparse attention over a window and selected compressed rows, with sinks (spec section 5).

N rows, H heads, hd head dim, rd RoPE dims, W window entries, K selected entries. The field's MegaAttention: RoPE, sink,
inverse RoPE and cache dequantisation in one op.
"""

import torch
from torch import Tensor

from kernels import quant
from kernels.registry import op
from kernels.rows import get_packed, get_plain, read_rows, row_bytes


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the last 2 * rd/2 dims, adjacent pairs, fp32, cast back (spec section 5.1).

    x [N, .., d]; cos, sin [N, rd/2]. Pass -sin for the inverse.
    """
    half = cos.shape[-1]
    shape = (cos.shape[0], *([1] * (x.dim() - 2)), half)
    cos, sin = cos.view(shape), sin.view(shape)
    head, tail = x[..., : -2 * half], x[..., -2 * half :].float().unflatten(-1, (half, 2))
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), -1)


def read_window(ring: Tensor, fresh: Tensor, rows: Tensor) -> Tensor:
    """Window entries [.., hd]: row >= 0 from the ring, -2 - r is row r of this step's fresh [N, hd], -1 is none."""
    hd = fresh.shape[-1]
    if ring.dtype == torch.uint8:
        codes, scales = row_bytes("fp8", hd)
        at = rows.clamp(min=0) * (codes + scales)
        old = get_packed(ring, at, at + codes, hd, "fp8", fresh.dtype)
    else:
        old = get_plain(ring, rows.clamp(min=0), hd)
    return torch.where((rows >= 0).unsqueeze(-1), old, fresh[(-2 - rows).clamp(min=0)])


@op
def sparse_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    sink: Tensor,
    fresh: Tensor,
    ring: Tensor,
    window: Tensor,
    pool: Tensor,
    slots: Tensor | None,
    planes: Tensor,
    stride: int,
) -> Tensor:
    """One softmax per head over window entries, selected compressed entries and a sink in the denominator.

    q [N, H, hd] before RoPE; cos, sin [N, rd/2]; sink [H] fp32; fresh [N, hd] window rows of this step as stored;
    window [N, W] as `read_window` reads it; pool, planes, stride: kernels/rows.py; slots [N, K] of compressed rows, -1
    none, or None for a window-only layer. Scores and sums in fp32, probabilities in q's dtype for the value product.
    A row that sees nothing gives 0. Returns [N, H, hd] after inverse RoPE.
    """
    q = rotate(q, cos, sin)
    keys, valid = read_window(ring, fresh, window), window != -1
    if slots is not None:
        latents = read_rows(pool, slots.clamp(min=0), planes, stride, q.shape[-1], "nvfp4", 0, q.dtype)
        keys, valid = torch.cat((keys, latents), 1), torch.cat((valid, slots >= 0), 1)
    keys = keys.float()
    z = torch.bmm(q.float(), keys.transpose(1, 2)) * q.shape[-1] ** -0.5
    z = z.masked_fill(~valid.unsqueeze(1), float("-inf"))
    top = z.amax(-1, keepdim=True).clamp(min=-1e30)
    p = torch.exp(z - top)
    total = p.sum(-1, keepdim=True) + torch.exp(sink.view(1, -1, 1) - top)
    out = torch.bmm(p.to(q.dtype).float(), keys) / total
    return rotate(out.to(q.dtype), cos, -sin)


@sparse_attention.cases
def _cases() -> list[tuple]:
    def case(n: int, dtype: torch.dtype, sparse: bool, packed: bool) -> tuple:
        window = torch.randint(-1, 10, (n, 6))
        window[:, -1] = -2 - torch.arange(n)
        window[-1] = -1  # a padding row sees nothing
        slots = torch.randint(-1, 48, (n, 5)) if sparse else None
        if sparse:
            slots[-1] = -1
        ring = torch.randn(10, 64).to(dtype)
        pool = torch.randn(6 * 24, 32).to(dtype)
        planes, stride = torch.tensor([0, 0, 16, 16, 8]), 24
        if packed:
            codes, scales = quant.encode_fp8(ring)
            ring = torch.cat((codes, scales), 1).flatten()
            pool = torch.randint(0, 120, (6 * 512,), dtype=torch.uint8)
            planes, stride = torch.tensor([0, 256, 288, 416, 8]), 512
        angle = torch.randn(n, 8)
        return (
            torch.randn(n, 4, 64).to(dtype), angle.cos(), angle.sin(), torch.randn(4), torch.randn(n, 64).to(dtype),
            ring, window, pool, slots, planes, stride,
        )  # fmt: skip

    return [
        case(2, torch.float32, False, False),
        case(7, torch.float32, True, False),
        case(8, torch.bfloat16, True, False),
        case(5, torch.bfloat16, True, True),
    ]
