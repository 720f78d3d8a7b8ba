"""Routing and expert products (spec section 7). N rows, D model dim, I expert width, E experts, k chosen.

`route` is what the field calls Mega-Gate; `grouped_mlp`, with dispatch and combine around it, MegaMoE.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import quant
from kernels.registry import op
from kernels.sizes import padded
from kernels.steady import softplus


@op
def route(x: Tensor, weight: Tensor, bias: Tensor, k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Choose experts by biased sqrt-softplus scores; weight them by the unbiased ones, normalised and scaled.

    x [N, D]; weight [E, D] fp32; bias [E] fp32. Returns ids [N, k] int64, weights [N, k] fp32.
    """
    scores = softplus(F.linear(x.float(), weight)).sqrt()
    ids = (scores + bias).topk(k, dim=-1).indices
    chosen = scores.gather(-1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def _grouped_shape(x, ids, weights, w1, s1, w3, s3, w2, s2, limit, quantise, pad):
    return x.new_empty(*ids.shape, x.shape[-1])


@op(opaque=_grouped_shape)
def grouped_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    s1: Tensor | None,
    w3: Tensor,
    s3: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    limit: float,
    quantise: bool,
    pad: int,
) -> Tensor:
    """Each row through each of its chosen experts; the routing weight multiplies before the down projection.

    x [N, D]; ids [N, k] (an id >= E: no expert, result 0); weights [N, k] fp32; w1, w3 [E, I, D], w2 [E, D, I],
    packed FP4 with scales [E, .., /32] or ready for use with scale None. ``pad``: an expert's rows are padded to a
    multiple of it, one of few (kernels/sizes.py), so that a row's result does not depend on how many others chose its
    expert. Returns [N, k, D].
    """
    experts, k = w1.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    bounds = torch.searchsorted(flat[order], torch.arange(experts + 1, device=ids.device)).tolist()
    out = x.new_zeros(flat.numel(), x.shape[-1])
    rows = quant.fake_fp8(x) if quantise else x
    for e in range(experts):
        begin, end = bounds[e], bounds[e + 1]
        if begin == end:
            continue
        picked = order[begin:end]
        a = F.pad(rows[picked // k], (0, 0, 0, padded(end - begin, pad) - (end - begin)))
        gate = F.linear(a, _expert(w1, s1, e, x.dtype)).float().clamp(max=limit)
        up = F.linear(a, _expert(w3, s3, e, x.dtype)).float().clamp(-limit, limit)
        w = F.pad(weights.flatten()[picked], (0, a.shape[0] - (end - begin)))
        hidden = (F.silu(gate) * up * w.unsqueeze(-1)).to(x.dtype)
        y = F.linear(quant.fake_fp8(hidden) if quantise else hidden, _expert(w2, s2, e, x.dtype))
        out[picked] = y[: end - begin]
    return out.view(*ids.shape, x.shape[-1])


@grouped_mlp.backend("dense")
def dense_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    s1: Tensor | None,
    w3: Tensor,
    s3: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    limit: float,
    quantise: bool,
    pad: int,
) -> Tensor:
    """Every expert on every row in three products, of which each row takes its own: no shape depends on data, so a
    graph holds all of it. The loop's bits where there are ``pad`` rows or more."""
    experts, dtype = w1.shape[0], x.dtype
    w1, w3, w2 = (w if s is None else quant.dequantise_fp4(w, s, dtype) for w, s in ((w1, s1), (w3, s3), (w2, s2)))
    rows = quant.fake_fp8(x) if quantise else x
    gate = F.linear(rows, w1.flatten(0, 1)).float().clamp(max=limit)
    up = F.linear(rows, w3.flatten(0, 1)).float().clamp(-limit, limit)
    share = x.new_zeros((x.shape[0], experts + 1), dtype=torch.float32).scatter(1, ids, weights)[:, :experts]
    hidden = ((F.silu(gate) * up).unflatten(1, (experts, -1)) * share.unsqueeze(-1)).to(dtype)
    hidden = (quant.fake_fp8(hidden) if quantise else hidden).transpose(0, 1)
    y = F.pad(torch.bmm(hidden, w2.transpose(1, 2)), (0, 0, 0, 0, 0, 1))  # [E + 1, N, D], zeros for no expert
    return y[ids, torch.arange(x.shape[0], device=x.device).unsqueeze(-1)]


def _expert(weight: Tensor, scale: Tensor | None, e: int, dtype: torch.dtype) -> Tensor:
    return weight[e] if scale is None else quant.dequantise_fp4(weight[e], scale[e], dtype)


@op
def gated_mlp(
    x: Tensor,
    w1: Tensor,
    s1: Tensor | None,
    w3: Tensor,
    s3: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    limit: float,
    quantise: bool,
) -> Tensor:
    """The shared expert: same clamps, weight 1, FP8 weights [I, D], [I, D], [D, I]. x [N, D] -> [N, D]."""

    def product(rows: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        w = weight if scale is None else quant.dequantise_fp8_block(weight, scale, x.dtype)
        return F.linear(quant.fake_fp8(rows) if quantise else rows, w)

    gate = product(x, w1, s1).float().clamp(max=limit)
    up = product(x, w3, s3).float().clamp(-limit, limit)
    return product((F.silu(gate) * up).to(x.dtype), w2, s2)


@route.cases
def _route_cases() -> list[tuple]:
    return [(torch.randn(n, 32), torch.randn(16, 32), torch.randn(16) / 10, 2, 1.5) for n in (2, 7, 64)]


@grouped_mlp.cases
def _grouped_cases() -> list[tuple]:
    def case(n: int, dtype: torch.dtype, quantise: bool, packed: bool) -> tuple:
        weights = []
        for shape in ((6, 32, 64), (6, 32, 64), (6, 64, 32)):
            w, s = quant.quantise_fp4(torch.randn(shape) / 8)
            weights += [w, s] if packed else [quant.dequantise_fp4(w, s, dtype), None]
        ids = torch.stack([torch.randperm(7)[:3] for _ in range(n)])  # id 6: padding
        return (torch.randn(n, 64).to(dtype), ids, torch.rand(n, 3), *weights, 2.0, quantise, 4)

    return [
        case(2, torch.float32, False, False),
        case(9, torch.float32, False, False),
        case(9, torch.float32, False, True),
        case(9, torch.bfloat16, True, False),
        case(9, torch.bfloat16, True, True),
    ]


@gated_mlp.cases
def _gated_cases() -> list[tuple]:
    w = [torch.randn(32, 64) / 8, None, torch.randn(32, 64) / 8, None, torch.randn(64, 32) / 6, None]
    return [(torch.randn(n, 64), *w, 2.0, False) for n in (2, 7)]
