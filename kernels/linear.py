"""Matrix products and norms. N rows, K in, M out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import quant
from kernels.registry import op


@op
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., K] @ weight [M, K]^T in their own dtype (bf16: fp32 accumulation, rounded once)."""
    return F.linear(x, weight)


@op
def quant_linear(x: Tensor, weight: Tensor, scale: Tensor | None, quantise: bool) -> Tensor:
    """A released FP8 linear (spec section 2.4): input quantised by 2.2 if ``quantise``, fp32 sums, result in x's dtype.

    x [.., K]; weight [M, K], ready for use where ``scale`` is None, else e4m3 with scale [ceil(M/32), K/32] e8m0.
    """
    w = weight if scale is None else quant.dequantise_fp8_block(weight, scale, x.dtype)
    return F.linear(quant.fake_fp8(x) if quantise else x, w)


@op
def grouped_linear(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Block-diagonal product (spec 5 step 6), input not quantised: x [N, G, K], weight [G * R, K] -> [N, G * R]."""
    w = weight if scale is None else quant.dequantise_fp8_block(weight, scale, x.dtype)
    groups = x.shape[1]
    out = torch.bmm(x.transpose(0, 1), w.unflatten(0, (groups, -1)).transpose(1, 2))
    return out.transpose(0, 1).flatten(1)


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim in fp32, cast back to x's dtype (spec section 2). x [.., D], weight [D]."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


@linear.cases
def _linear_cases() -> list[tuple]:
    return [(torch.randn(n, 64), torch.randn(40, 64)) for n in (2, 8, 13)]


@quant_linear.cases
def _quant_linear_cases() -> list[tuple]:
    w, s = quant.quantise_fp8_block(torch.randn(40, 64))
    dense = quant.dequantise_fp8_block(w, s, torch.float32)
    x = torch.randn(7, 64)
    return [(x, w, s, False), (x, w, s, True), (x, dense, None, True), (x[:2].bfloat16(), dense.bfloat16(), None, True)]


@grouped_linear.cases
def _grouped_linear_cases() -> list[tuple]:
    return [(torch.randn(n, 2, 64), torch.randn(64, 64), None) for n in (2, 9)]


@rms_norm.cases
def _rms_norm_cases() -> list[tuple]:
    x = torch.randn(5, 64)
    return [(x, torch.rand(64), 1e-20), (x.bfloat16(), torch.rand(64).bfloat16(), 1e-20)]
