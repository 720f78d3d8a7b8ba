"""mHC (spec section 4): stream mixing coefficients with Sinkhorn, collapse and post.

N rows, C streams, D model dim. The whole op group is what the field calls Mega-mHC.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.registry import op
from kernels.steady import sigmoid


@op
def mhc_mix(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one half-block from its input streams, all fp32.

    x [N, C, D]; fn [(2 + C) * C, C * D]; base [(2 + C) * C]; scale [3]. Returns pre-mix [N, C], post-mix [N, C]
    and stream mixing [N, C, C] (source stream first), doubly normalised ``iters`` times, columns last.
    """
    n, c, _ = x.shape
    flat = x.float().flatten(1)
    m = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = sigmoid(m[:, :c] * scale[0] + base[:c]) + eps
    post = 2 * sigmoid(m[:, c : 2 * c] * scale[1] + base[c : 2 * c])
    mix = torch.softmax((m[:, 2 * c :] * scale[2] + base[2 * c :]).view(n, c, c), -1) + eps
    return pre, post, sinkhorn(mix, iters, eps)


def sinkhorn(mix: Tensor, iters: int, eps: float) -> Tensor:
    """Divide columns by their sums, then rows and columns in turn, ``iters`` column passes in all. mix [N, C, C]."""
    mix = mix.permute(1, 2, 0).contiguous()  # rows last: each pass is then one vector operation over all of them
    mix = mix / (mix.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        mix = mix / (mix.sum(1, keepdim=True) + eps)
        mix = mix / (mix.sum(0, keepdim=True) + eps)
    return mix.permute(2, 0, 1).contiguous()


@op
def mhc_collapse(pre: Tensor, x: Tensor) -> Tensor:
    """Weighted sum of the streams: pre [N, C] fp32, x [N, C, D] -> [N, D] in x's dtype, summed in fp32."""
    return (pre.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


@op
def mhc_post(o: Tensor, x: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """New streams: X'_k = post_k o + sum_j mix_jk X_j, fp32, cast to x's dtype. o [N, D], x [N, C, D] -> [N, C, D]."""
    mixed = (mix.unsqueeze(-1) * x.float().unsqueeze(2)).sum(1)
    return (post.unsqueeze(-1) * o.float().unsqueeze(1) + mixed).to(x.dtype)


@mhc_mix.cases
def _mix_cases() -> list[tuple]:
    return [
        (torch.randn(n, 4, 32), torch.randn(24, 128) / 11, torch.randn(24), torch.rand(3), 20, 1e-6, 1e-20)
        for n in (2, 7, 64)
    ]


@mhc_collapse.cases
def _collapse_cases() -> list[tuple]:
    return [(torch.rand(n, 4), torch.randn(n, 4, 32).to(t)) for n in (2, 7) for t in (torch.float32, torch.bfloat16)]


@mhc_post.cases
def _post_cases() -> list[tuple]:
    return [(torch.randn(n, 32), torch.randn(n, 4, 32), torch.rand(n, 4), torch.rand(n, 4, 4)) for n in (2, 7)]
