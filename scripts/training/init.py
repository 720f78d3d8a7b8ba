"""Shapes and first values of the training parameters, by release names; a layer's experts are one tensor."""

import hashlib
import math

import torch
from torch import Tensor

from model.config import ModelConfig

BRANCH_OUT = 0.5  # damping of the matrices that write into the streams
TABLE_STD = 0.1
PRE_OWN, PRE_OTHER = 1.1, -2.4  # sigmoid: 0.75 from a layer's own stream, 0.083 from each other
KEEP = 3.0  # diagonal of the stream mixing logits: each stream mostly stays itself
SCALE = 0.1  # how much of the mixing depends on the token at first


def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every backbone and drafter parameter. Names of spec section 11, scales and ``bias_vl`` left out."""
    d, v = cfg.hidden_size, cfg.vocab_size
    out = {"embed.weight": (v, d), "head.weight": (v, d), "norm.weight": (d,)}
    for layer in range(cfg.num_hidden_layers):
        pre = f"layers.{layer}."
        out |= _block(cfg, pre, cfg.n_routed_experts) | _sources(cfg, layer, pre + "attn.")
        if layer in cfg.engram_layer_ids:
            rows = cfg.engram_num_embeddings[cfg.engram_layer_ids.index(layer)]
            wide = cfg.engram_columns * cfg.engram_head_dim
            out[pre + "engram.embed.weight"] = (rows, cfg.engram_head_dim)
            out[pre + "engram.wkv.weight"] = ((cfg.hc_mult + 1) * d, wide)
            out[pre + "engram.q_weight"] = out[pre + "engram.k_weight"] = (cfg.hc_mult, d)
    last = cfg.num_nextn_predict_layers - 1
    for stage in range(last + 1):
        out |= _block(cfg, f"mtp.{stage}.", cfg.dspark_n_routed_experts)
    if last >= 0:
        rank = cfg.dspark_markov_rank
        out["mtp.0.main_proj.weight"] = (d, d * len(cfg.dspark_target_layer_ids))
        out["mtp.0.main_norm.weight"] = out[f"mtp.{last}.norm.weight"] = (d,)
        out[f"mtp.{last}.markov_head.embed.weight"] = out[f"mtp.{last}.markov_head.head.weight"] = (v, rank)
        out[f"mtp.{last}.confidence_head.proj.weight"] = (1, d + rank)
    return out


def _block(cfg: ModelConfig, pre: str, experts: int) -> dict[str, tuple[int, ...]]:
    d, i, s = cfg.hidden_size, cfg.moe_intermediate_size, cfg.hc_mult
    heads = cfg.num_attention_heads * cfg.head_dim
    out: dict[str, tuple[int, ...]] = {
        pre + "attn.attn_sink": (cfg.num_attention_heads,),
        pre + "attn.wq_a.weight": (cfg.q_lora_rank, d),
        pre + "attn.q_norm.weight": (cfg.q_lora_rank,),
        pre + "attn.wq_b.weight": (heads, cfg.q_lora_rank),
        pre + "attn.wkv.weight": (cfg.head_dim, d),
        pre + "attn.kv_norm.weight": (cfg.head_dim,),
        pre + "attn.wo_a.weight": (cfg.o_groups * cfg.o_lora_rank, heads // cfg.o_groups),
        pre + "attn.wo_b.weight": (d, cfg.o_groups * cfg.o_lora_rank),
        pre + "ffn.gate.weight": (experts, d),
        pre + "ffn.gate.bias": (experts,),
    }
    for half in ("attn", "ffn"):
        out[f"{pre}{half}_norm.weight"] = (d,)
        out[f"{pre}hc_{half}_fn"] = ((2 + s) * s, s * d)
        out[f"{pre}hc_{half}_base"] = ((2 + s) * s,)
        out[f"{pre}hc_{half}_scale"] = (3,)
    for w, shape in (("w1", (i, d)), ("w3", (i, d)), ("w2", (d, i))):
        out[f"{pre}ffn.experts.{w}"] = (experts, *shape)
        out[f"{pre}ffn.shared_experts.{w}.weight"] = shape
    return out


def _sources(cfg: ModelConfig, layer: int, pre: str) -> dict[str, tuple[int, ...]]:
    """Compressor, index keys and indexer of the layers that own them."""
    d, out = cfg.hidden_size, {}
    if layer in cfg.kv_source_layer_ids:
        for w in ("wkv", "wgate")[: cfg.compress_ratios[layer]]:
            out[f"{pre}compressor.{w}.weight"] = (cfg.head_dim, d)
        out[pre + "compressor.norm.weight"] = (cfg.head_dim,)
        out[pre + "indexer.wk.weight"] = (cfg.index_head_dim, cfg.head_dim)
        out[pre + "indexer.k_norm.weight"] = (cfg.index_head_dim,)
    if layer in cfg.index_source_layer_ids:
        out[pre + "indexer.wq_b.weight"] = (cfg.index_n_heads * cfg.index_head_dim, cfg.q_lora_rank)
        out[pre + "indexer.weights_proj.weight"] = (cfg.index_n_heads, d)
    return out


def initial(cfg: ModelConfig, seed: int) -> dict[str, Tensor]:
    """First values; each tensor's numbers depend on the seed and its own name only."""
    return {name: _first(cfg, name, shape, seed) for name, shape in shapes(cfg).items()}


def _first(cfg: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape)
    if name.endswith(("attn_sink", "gate.bias")):
        return torch.zeros(shape)
    if name.endswith("_scale"):
        return torch.full(shape, SCALE)
    if name.endswith("_base"):
        return _mixing_base(cfg, name)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(key))
    if name == "embed.weight":
        return values
    if name.endswith("engram.embed.weight"):
        return values * TABLE_STD
    if "markov_head" in name or "confidence" in name:
        return values * 0.02
    damp = BRANCH_OUT if name.endswith(("wo_b.weight", "w2", "w2.weight")) else 1.0
    return values * damp / math.sqrt(shape[-1])


def _mixing_base(cfg: ModelConfig, name: str) -> Tensor:
    """Layer l reads mostly stream l mod S, writes to all alike, and leaves the streams apart."""
    s, layer = cfg.hc_mult, int(name.split(".")[1])
    pre = torch.full((s,), PRE_OTHER)
    pre[layer % s] = PRE_OWN
    return torch.cat([pre, torch.zeros(s), (torch.eye(s) * KEEP).flatten()])
