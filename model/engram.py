"""Engram (spec section 8): rows of a hashed n-gram table, gated into the streams.

N rows, C streams, D model dim, n = max n-gram, M = (n - 1) * heads columns, W row width.
"""

from torch import Tensor

from model import tree
from model.config import ModelConfig
from model.tree import Quantized, Spec


@tree.node
class EngramParams:
    embed: Quantized  # [rows, W] e4m3 with one scale per 32 of a row
    wkv: Quantized  # [(C + 1) * D, M * W]
    q_weight: Tensor  # [C, D]
    k_weight: Tensor  # [C, D]


def specs(cfg: ModelConfig, rows: int) -> EngramParams:
    c, d, w = cfg.hc_mult, cfg.hidden_size, cfg.engram_head_dim
    wide = cfg.engram_columns * w
    return EngramParams(
        embed=Spec((rows, w), "fp8", rowwise=True),
        wkv=Spec(((c + 1) * d, wide), "fp8", scale=wide**-0.5),
        q_weight=Spec((c, d), bare=True, init="ones"),
        k_weight=Spec((c, d), bare=True, init="ones"),
    )
