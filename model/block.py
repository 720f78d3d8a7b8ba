"""One block: attention and experts, each between an mHC mix and post (spec section 4)."""

from torch import Tensor

from model import attention, mhc, moe, tree
from model.config import LayerKind, ModelConfig
from model.tree import Spec


@tree.node
class BlockParams:
    attn_norm: Tensor  # [D]
    ffn_norm: Tensor  # [D]
    hc_attn: mhc.MixParams
    hc_ffn: mhc.MixParams
    attn: attention.AttentionParams
    ffn: moe.MoEParams


def specs(cfg: ModelConfig, kind: LayerKind, experts: int) -> BlockParams:
    norm = Spec((cfg.hidden_size,), init="ones")
    return BlockParams(
        attn_norm=norm,
        ffn_norm=norm,
        hc_attn=mhc.specs(cfg),
        hc_ffn=mhc.specs(cfg),
        attn=attention.specs(cfg, kind),
        ffn=moe.specs(cfg, experts),
    )
