"""Muon for matrices, Adam for the rest, over a flat dict of fp32 parameters. State is updated in place."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TABLES = ("embed.weight", "head.weight")  # embedding, head, Engram and Markov tables
SMALL = ("hc_attn_fn", "hc_ffn_fn", "gate.weight", "weights_proj.weight", "confidence_head.proj.weight")
# Coefficients of the quintic Newton-Schulz iteration that pulls singular values to about one (Jordan, Muon, 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Rates:
    """Step sizes at full rate; a schedule multiplies them all."""

    matrix: float = 0.02
    table: float = 8e-3
    vector: float = 3e-3
    small: float = 1e-3
    decay: float = 0.05  # of matrices, per unit of step size
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)


def kind(name: str, value: Tensor) -> str:
    """Which rule updates a parameter: matrix, table, vector or small."""
    if name.endswith(SMALL):
        return "small"
    if name.endswith(TABLES):
        return "table"
    return "matrix" if value.dim() >= 2 and not name.endswith(("q_weight", "k_weight")) else "vector"


def start(params: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Zero moments for the parameters that will be trained."""
    state = {}
    for name in names:
        state["m/" + name] = torch.zeros_like(params[name])
        if kind(name, params[name]) != "matrix":
            state["v/" + name] = torch.zeros_like(params[name])
    return state


@torch.no_grad()
def update(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: dict[str, Tensor],
    step: int,
    rate: float,
    rates: Rates,
) -> None:
    """One step, in place on ``params`` and ``state``. ``step`` counts from 0; ``rate`` is the schedule's factor."""
    shaped: dict[tuple[int, ...], list[str]] = {}
    by_rate: dict[str, list[str]] = {}
    for name, grad in grads.items():
        if (rule := kind(name, grad)) == "matrix":
            shaped.setdefault(tuple(grad.shape[-2:]), []).append(name)
        else:
            by_rate.setdefault(rule, []).append(name)
    for shape, names in shaped.items():
        _muon(shape, names, params, grads, state, rate, rates)
    for rule, names in by_rate.items():
        _adam(names, params, grads, state, step, rate * getattr(rates, rule), rates.betas)


def _muon(shape, names, params, grads, state, rate: float, rates: Rates) -> None:
    momenta = [state["m/" + n] for n in names]
    values = [grads[n] for n in names]
    torch._foreach_lerp_(momenta, values, 1 - rates.momentum)
    torch._foreach_lerp_(values, momenta, rates.momentum)  # Nesterov: look one step ahead; gradients are ours to use up
    stacked = torch.cat([v.reshape(-1, *shape) for v in values])
    step = orthogonal(stacked) * (max(1.0, shape[0] / shape[1]) ** 0.5)
    at, lr = 0, rates.matrix * rate
    for name in names:
        p = params[name]
        count = p.numel() // (shape[0] * shape[1])
        p.mul_(1 - lr * rates.decay).add_(step[at : at + count].view_as(p), alpha=-lr)
        at += count


def orthogonal(g: Tensor, rounds: int = 5) -> Tensor:
    """Matrices [M, rows, cols] with all singular values pulled to about one. bf16 inside, result in fp32."""
    a, b, c = QUINTIC
    tall = g.shape[1] > g.shape[2]
    x = (g.transpose(1, 2) if tall else g).bfloat16()
    x = x / (x.float().flatten(1).norm(dim=1)[:, None, None] + 1e-7).bfloat16()
    for _ in range(rounds):
        s = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return (x.transpose(1, 2) if tall else x).float()


def _adam(names, params, grads, state, step: int, lr: float, betas: tuple[float, float]) -> None:
    p, g = [params[n] for n in names], [grads[n] for n in names]
    m, v = [state["m/" + n] for n in names], [state["v/" + n] for n in names]
    torch._foreach_lerp_(m, g, 1 - betas[0])
    torch._foreach_mul_(v, betas[1])
    torch._foreach_addcmul_(v, g, g, 1 - betas[1])
    denominator = torch._foreach_sqrt(torch._foreach_div(v, 1 - betas[1] ** (step + 1)))
    torch._foreach_add_(denominator, 1e-10)
    torch._foreach_addcdiv_(p, m, denominator, -lr / (1 - betas[0] ** (step + 1)))
