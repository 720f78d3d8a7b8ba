"""Indexer (spec sections 6.2-6.5): which compressed entries each query attends to.

N rows, D model dim, Hi index heads, Di index dim, S latents in reach of the page tables, K = index_topk.
"""

from torch import Tensor

from kernels.attention import rotate
from kernels.index import index_scores, mask_blocks, select_blocks, select_topk
from kernels.linear import linear, quant_linear, rms_norm
from kernels.quant import fake_mxfp4
from kernels.rows import store_index
from model import tree
from model.batch import Batch, Carry, View
from model.cache import Address, Cache, Layout
from model.config import LayerKind, ModelConfig
from model.runtime import Runtime
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


def publish(
    cfg: ModelConfig, rt: Runtime, layout: Layout, p: IndexerParams, latent: Tensor, rope: tuple[Tensor, Tensor],
    slots: Tensor, at: Address, cache: Cache,
) -> None:  # fmt: skip
    """Write index keys of latents [N, hd] (before RoPE) to cache slots [N] (spec section 6.2)."""
    k = rt.kernels
    key = linear(latent, p.wk, backend=k.linear)
    key = rms_norm(key, p.k_norm, cfg.rms_norm_eps, backend=k.rms_norm)
    store_index(cache.pages, slots, at.planes, layout.stride, rotate(key, *rope), rt.qat, backend=k.store_index)


def apply(
    cfg: ModelConfig, rt: Runtime, layout: Layout, kind: LayerKind, p: IndexerParams, x: Tensor, qr: Tensor,
    at: Address, batch: Batch, view: View, cache: Cache, carry: Carry,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Select compressed entries for each row. x [N, D] normed input, qr [N, q_lora] query latent.

    Returns topk_idxs [N, K] (ascending positions, then -1) and the candidate blocks to hand on: this layer's own where
    it publishes them, else the carry's.
    """
    n, heads, di = x.shape[0], cfg.index_n_heads, cfg.index_head_dim
    q = quant_linear(qr, p.wq_b.weight, p.wq_b.scale, rt.qat, backend=rt.kernels.quant_linear).view(n, heads, di)
    q = rotate(q, *view.compress_rope)
    q = fake_mxfp4(q) if rt.qat else q
    w = linear(x, p.weights_proj, backend=rt.kernels.linear) * (di**-0.5 * heads**-0.5)
    reach = (batch.positions + 1) // kind.source_ratio
    scores = index_scores(
        q, w, reach, batch.tiles, batch.tile_of, batch.page_tables[batch.tile_seqs], cache.pages, at.planes,
        layout.stride, layout.page_size // kind.source_ratio, backend=rt.kernels.index_scores,
    )  # fmt: skip
    blocks, size = carry.blocks, cfg.candidate_block_size
    if kind.publishes:
        keep = cfg.candidate_topk_blocks
        blocks = select_blocks(scores, reach, size, keep, backend=rt.kernels.select_blocks)
    if kind.obeys:
        scores = mask_blocks(scores, blocks, size, backend=rt.kernels.mask_blocks)
    return select_topk(scores, cfg.index_topk, backend=rt.kernels.select_topk), blocks
