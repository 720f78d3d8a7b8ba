"""The whole model: parameters, and one ragged forward for prefill, decode and verify (spec section 3)."""

from torch import Tensor

from model import block, dspark, engram, tree
from model.config import ModelConfig
from model.tree import Spec


@tree.node
class LayerParams:
    engram: engram.EngramParams | None
    block: block.BlockParams


@tree.node
class ModelParams:
    embed: Tensor  # [V, D]
    head: Tensor  # [V, D] fp32
    norm: Tensor  # [D]
    layers: tuple[LayerParams, ...]
    mtp: tuple[dspark.StageParams, ...]


def specs(cfg: ModelConfig) -> ModelParams:
    v, d = cfg.vocab_size, cfg.hidden_size
    rows = dict(zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True))
    return ModelParams(
        embed=Spec((v, d)),
        head=Spec((v, d), promote=True, scale=d**-0.5),
        norm=Spec((d,), init="ones"),
        layers=tuple(
            LayerParams(
                engram=engram.specs(cfg, rows[i]) if i in rows else None,
                block=block.specs(cfg, cfg.kind(i), cfg.n_routed_experts),
            )
            for i in range(cfg.num_hidden_layers)
        ),
        mtp=dspark.specs(cfg),
    )
