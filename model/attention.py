"""Window + compressed sparse attention with sinks (spec sections 5 and 6.1).

N rows, D model dim, H heads, hd head dim, rd RoPE dims, G output groups.
"""

from torch import Tensor

from model import indexer, tree
from model.config import LayerKind, ModelConfig
from model.tree import Quantized, Spec


@tree.node
class CompressorParams:
    """Latents from tokens; ``wgate`` only where a group spans two tokens (fp32 there, else bf16)."""

    wkv: Tensor  # [hd, D]
    wgate: Tensor | None  # [hd, D]
    norm: Tensor  # [hd]


@tree.node
class AttentionParams:
    wq_a: Quantized  # [q_lora, D]
    q_norm: Tensor  # [q_lora]
    wq_b: Quantized  # [H * hd, q_lora]
    wkv: Quantized  # [hd, D]
    kv_norm: Tensor  # [hd]
    wo_a: Quantized  # [G * o_lora, H * hd / G]
    wo_b: Quantized  # [D, G * o_lora]
    attn_sink: Tensor  # [H] fp32
    compressor: CompressorParams | None
    indexer: indexer.IndexerParams | None


def specs(cfg: ModelConfig, kind: LayerKind) -> AttentionParams:
    d, hd, ql = cfg.hidden_size, cfg.head_dim, cfg.q_lora_rank
    h, g, ol = cfg.num_attention_heads, cfg.o_groups, cfg.o_lora_rank
    compressor = None
    if kind.ratio:
        two = kind.ratio == 2
        latent = Spec((hd, d), promote=two, scale=d**-0.5)
        compressor = CompressorParams(wkv=latent, wgate=latent if two else None, norm=Spec((hd,), init="ones"))
    return AttentionParams(
        wq_a=Spec((ql, d), "fp8", scale=d**-0.5),
        q_norm=Spec((ql,), init="ones"),
        wq_b=Spec((h * hd, ql), "fp8", scale=ql**-0.5),
        wkv=Spec((hd, d), "fp8", scale=d**-0.5),
        kv_norm=Spec((hd,), init="ones"),
        wo_a=Spec((g * ol, h * hd // g), "fp8", scale=(h * hd // g) ** -0.5),
        wo_b=Spec((d, g * ol), "fp8", scale=(g * ol) ** -0.5),
        attn_sink=Spec((h,), "f32", bare=True, init="zeros"),
        compressor=compressor,
        indexer=indexer.specs(cfg, kind),
    )
