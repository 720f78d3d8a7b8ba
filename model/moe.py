"""Mixture of experts with a shared expert (spec section 7).

N rows, D model dim, I expert width, E experts, k chosen.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernels.moe import gated_mlp, grouped_mlp, route
from model import tree
from model.config import ModelConfig
from model.exchange import routed_mlp
from model.runtime import Runtime
from model.tree import Quantized, Spec
from parallel import expert
from parallel.expert import Placement

# Up to here all experts on all rows cost less than the calls of a loop. Measured on a CPU with 16 experts of 18k values
# a matrix; larger matrices cost the time to read them, which the loop spends only on those that a row chose.
DENSE_ROWS, DENSE_EXPERTS, DENSE_VALUES = 64, 32, 2**20


@tree.node
class GateParams:
    weight: Tensor  # [E, D] fp32
    bias: Tensor  # [E] fp32, steers the choice only


@tree.node
class ExpertParams:
    """w1 gate, w3 up [.., I, D]; w2 down [.., D, I]; the routed ones carry a leading [E]."""

    w1: Quantized
    w3: Quantized
    w2: Quantized


@tree.node
class MoEParams:
    gate: GateParams
    experts: ExpertParams
    shared_experts: ExpertParams


def specs(cfg: ModelConfig, experts: int) -> MoEParams:
    d, i = cfg.hidden_size, cfg.moe_intermediate_size

    def mlp(lead: tuple[int, ...], fmt: str) -> ExpertParams:
        up = Spec((*lead, i, d), fmt, scale=d**-0.5, stack=bool(lead))
        down = Spec((*lead, d, i), fmt, scale=i**-0.5, stack=bool(lead))
        return ExpertParams(w1=up, w3=up, w2=down)

    return MoEParams(
        gate=GateParams(
            weight=Spec((experts, d), bare=True, promote=True, scale=d**-0.5),
            bias=Spec((experts,), "f32", bare=True, init="zeros"),
        ),
        experts=mlp((experts,), "fp4"),
        shared_experts=mlp((), "fp8"),
    )


def held(p: MoEParams) -> list[Tensor]:
    """All that belongs to a routed expert, weights and scales, each [experts held, ..]."""
    return [t for t in tree_leaves(p.experts) if t is not None]


def fitted(rt: Runtime, p: MoEParams, rows: int) -> Runtime:
    """``rt`` for a step of so many rows. `compile` has two ways through the experts, the opaque loop and `dense`;
    which is cheaper is settled here, outside of any graph, since a graph serves all numbers of rows."""
    w1 = p.experts.w1
    if rt.dispatch == "alltoall":  # how many rows come here is known only on the way
        return rt
    ready = w1.scale is None and w1.weight.shape[0] <= DENSE_EXPERTS and w1.weight.numel() <= DENSE_VALUES
    few = rt.group_rows <= rows * rt.ep.size <= DENSE_ROWS
    return _dense(rt) if ready and few and rt.kernels.grouped_mlp == "compile" else rt


@lru_cache
def _dense(rt: Runtime) -> Runtime:
    return replace(rt, kernels=replace(rt.kernels, grouped_mlp="dense"))


def apply(
    cfg: ModelConfig, rt: Runtime, k: int, p: MoEParams, place: Placement, x: Tensor, positions: Tensor, load: Tensor,
    layer: Tensor,
) -> Tensor:  # fmt: skip
    """x [N, D] -> [N, D]: k experts a row summed in slot order, plus the shared one, in fp32 (spec section 7).

    Adds the step's choices to row ``layer`` of ``load`` [layers, P + 1] in place, by physical slot; rows without a
    position [N] choose no expert. The routed experts of a row run where ``place`` says, on any rank of ``rt.ep``.
    """
    ids, weights = route(x, p.gate.weight, p.gate.bias, k, cfg.routed_scaling_factor, backend=rt.kernels.route)
    valid = (positions >= 0).unsqueeze(-1)
    slots = expert.physical(place, torch.where(valid, ids, p.gate.weight.shape[0]), positions)
    counted = torch.where(valid, slots, load.shape[1] - 1)
    load.index_put_((layer.expand_as(counted), counted), torch.ones_like(counted), accumulate=True)
    e, s = p.experts, p.shared_experts
    held = e.w1.weight, e.w1.scale, e.w3.weight, e.w3.scale, e.w2.weight, e.w2.scale
    routed = ROUTED[rt.dispatch](rt, x, slots, weights, *held, cfg.swiglu_limit)
    shared = gated_mlp(
        x, s.w1.weight, s.w1.scale, s.w3.weight, s.w3.scale, s.w2.weight, s.w2.scale,
        cfg.swiglu_limit, rt.qat, backend=rt.kernels.gated_mlp,
    )  # fmt: skip
    return (routed.float().sum(1) + shared.float()).to(x.dtype)


def everywhere(rt: Runtime, x: Tensor, slots: Tensor, weights: Tensor, w1: Tensor, *more: Any) -> Tensor:
    """Results [N, k, D] of rows x [N, D] in physical slots [N, k]: every rank sees all rows, and runs its experts."""
    rows, slots, weights = expert.dispatch(rt.ep, x, slots, weights)
    mine = expert.local(rt.ep, slots, w1.shape[0])
    k = rt.kernels.grouped_mlp
    return expert.combine(rt.ep, grouped_mlp(rows, mine, weights, w1, *more, rt.qat, rt.group_rows, backend=k))


def where_held(rt: Runtime, x: Tensor, slots: Tensor, weights: Tensor, *more: Any) -> Tensor:
    """The same bits: a row goes only to ranks that hold an expert of it."""
    if rt.ep.size == 1:
        return everywhere(rt, x, slots, weights, *more)
    how = rt.qat, rt.group_rows, rt.kernels.grouped_mlp
    return routed_mlp(x, slots, weights, *more, *how, rt.ep.size, rt.ep.rank, rt.ep.group)


ROUTED = {"allgather": everywhere, "alltoall": where_held}
