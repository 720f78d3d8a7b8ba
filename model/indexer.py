"""Indexer (spec sections 6.2-6.5): which compressed entries each query attends to.

N rows, D model dim, Hi index heads, Di index dim, S latents in reach of the page tables, K = index_topk.
"""

from torch import Tensor

from model import tree
from model.config import LayerKind, ModelConfig
from model.tree import Quantized, Spec


@tree.node
class IndexerParams:
    """Keys only where the layer owns compressed KV."""

    wk: Tensor | None  # [Di, hd]
    k_norm: Tensor | None  # [Di]
    wq_b: Quantized  # [Hi * Di, q_lora]
    weights_proj: Tensor  # [Hi, D]


def specs(cfg: ModelConfig, kind: LayerKind) -> IndexerParams | None:
    if not kind.index:
        return None
    heads, di, hd, ql = cfg.index_n_heads, cfg.index_head_dim, cfg.head_dim, cfg.q_lora_rank
    return IndexerParams(
        wk=Spec((di, hd), scale=hd**-0.5) if kind.ratio else None,
        k_norm=Spec((di,), init="ones") if kind.ratio else None,
        wq_b=Spec((heads * di, ql), "fp8", scale=ql**-0.5),
        weights_proj=Spec((heads, cfg.hidden_size), scale=cfg.hidden_size**-0.5),
    )
