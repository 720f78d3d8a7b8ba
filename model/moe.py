"""Mixture of experts with a shared expert (spec section 7). N rows, D model dim, I expert width, E experts, k chosen."""

from torch import Tensor

from model import tree
from model.config import ModelConfig
from model.tree import Quantized, Spec


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
