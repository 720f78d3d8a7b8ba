"""Tensors made once from the config: RoPE frequencies and Engram's hash constants (spec sections 5.1, 8)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from model import engram_tables
from model.batch import Constants, HashConstants
from model.config import ModelConfig


def window_freqs(cfg: ModelConfig) -> Tensor:
    """[rd/2] fp32: plain RoPE of window-only layers and the drafter."""
    rd = cfg.qk_rope_head_dim
    return 1.0 / cfg.rope_theta ** (torch.arange(0, rd, 2, dtype=torch.float32) / rd)


def compress_freqs(cfg: ModelConfig) -> Tensor:
    """[rd/2] fp32: YaRN of the layers that read compressed KV; the same at every position."""
    rd, base, scaling = cfg.qk_rope_head_dim, cfg.compress_rope_theta, cfg.rope_scaling
    freqs = 1.0 / base ** (torch.arange(0, rd, 2, dtype=torch.float32) / rd)

    def dim_of(turns: float) -> float:
        return rd * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), rd - 1)
    ramp = ((torch.arange(rd // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freqs / scaling.factor * ramp + freqs * (1 - ramp)


def hashes(cfg: ModelConfig) -> tuple[HashConstants, ...]:
    """Hash constants of each Engram layer."""
    ngram, heads = cfg.engram_max_ngram_size, cfg.engram_n_heads
    tables = engram_tables.primes(len(cfg.engram_layer_ids), cfg.engram_vocab_size, ngram, heads)
    out = []
    for layer, sizes in zip(cfg.engram_layer_ids, tables, strict=True):
        table = torch.tensor(sizes, dtype=torch.int64)
        offsets = table.flatten().cumsum(0) - table.flatten()
        factors = engram_tables.multipliers(layer, cfg.engram_compressed_vocab_size, ngram)
        out.append(HashConstants(torch.tensor(factors), table, offsets.view_as(table)))
    return tuple(out)


def constants(cfg: ModelConfig, token_map: Sequence[int] | None = None) -> Constants:
    """All of them. ``token_map`` [V] comes from the tokenizer (model/engram_tables.py); only Engram needs it.

    None with Engram layers folds ids modulo the compressed size: for random weights, where no tokenizer exists.
    """
    if token_map is None:
        token_map = [i % cfg.engram_compressed_vocab_size for i in range(cfg.vocab_size)]
    if len(token_map) != cfg.vocab_size:
        raise ValueError(f"the tokenizer has {len(token_map)} tokens, vocab_size is {cfg.vocab_size}")
    size = max(token_map) + 1
    if cfg.engram_layer_ids and size > cfg.engram_compressed_vocab_size:
        raise ValueError(
            f"engram_compressed_vocab_size is {cfg.engram_compressed_vocab_size}, the tokenizer's map has {size} ids"
        )
    return Constants(
        window_freqs=window_freqs(cfg),
        compress_freqs=compress_freqs(cfg),
        token_map=torch.tensor(token_map, dtype=torch.int64),
        hashes=hashes(cfg),
    )
