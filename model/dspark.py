"""DSpark drafter (spec section 9): a few window-only stages that draft a block of tokens in one pass."""

from torch import Tensor

from model import block, tree
from model.config import LayerKind, ModelConfig
from model.tree import Quantized, Spec


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
