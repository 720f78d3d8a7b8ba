"""Small random models for tests: configs by hypothesis, sequences on scattered pages, runs cut into steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import choose
from model import checkpoint, release, transformer, tree
from model.cache import Layout
from model.config import ModelConfig
from model.constants import constants
from model.engram_tables import primes, table_rows
from model.pack import Span
from model.runtime import Runtime
from model.transformer import Model
from model.tree import Quantized
from serve.runner import Runner

PAGE = 64
VOCAB = 96
WINDOW, REUSE, REINDEX, FULL1, FULL2 = "window", "reuse", "reindex", "full 1", "full 2"
ROLES = (WINDOW, FULL2, REUSE, FULL1, REINDEX, REUSE)  # every role, in force from a few dozen tokens on


def config(
    roles: Sequence[str] = ROLES,
    candidates: bool = True,
    engram: Sequence[int] = (1, 3),
    ngram: int = 3,
    stages: int = 2,
    taps: Sequence[int] = (1, 2),
    **changes,
) -> ModelConfig:
    """A valid config of layers with ``roles``; one that reuses what no layer has published yet is window-only."""
    ratios, sources, index = [], [], []
    for i, role in enumerate(roles):
        if role in (FULL1, FULL2):
            sources.append(i)
        if role in (FULL1, FULL2) or (role == REINDEX and sources):
            index.append(i)
        own = {FULL1: 1, FULL2: 2, WINDOW: 0}.get(role)
        ratios.append(own if own is not None else ratios[sources[-1]] if sources else 0)
    sizes = primes(len(engram), 50, ngram, 2)
    values = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": len(roles), "num_attention_heads": 4,
        "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 32,
        "sliding_window": 8, "compress_ratios": (*ratios, *(0,) * stages), "kv_source_layer_ids": tuple(sources),
        "index_source_layer_ids": tuple(index), "index_n_heads": 8, "index_head_dim": 32, "index_topk": 5,
        "candidate_source_layer_id": sources[-1] if candidates else -1, "candidate_topk_blocks": 4,
        "candidate_block_size": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "engram_layer_ids": tuple(engram),
        "engram_num_embeddings": tuple(map(table_rows, sizes)), "engram_max_ngram_size": ngram, "engram_n_heads": 2,
        "engram_head_dim": 32, "engram_vocab_size": 50, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 80,
        "num_nextn_predict_layers": stages, "dspark_block_size": 3 if stages else 0, "dspark_noise_token_id": 4,
        "dspark_target_layer_ids": tuple(taps) if stages else (), "dspark_markov_rank": 16,
        "dspark_n_routed_experts": 4 if stages else 0, "dspark_num_experts_per_tok": 2,
        "max_position_embeddings": 4096, "hc_sinkhorn_iters": 3,
    }  # fmt: skip
    return ModelConfig(**(values | changes))


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Models of 3-6 layers with any order of roles, and sizes small enough that every limit is reached in 70 tokens."""
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=2, max_size=5))
    roles.insert(draw(st.integers(0, 2)), draw(st.sampled_from((FULL1, FULL2))))
    layers = st.integers(0, len(roles) - 1)
    window = draw(st.integers(4, 16))
    stages = draw(st.integers(0, 2))
    block = draw(st.sampled_from((1, 2, 4)))
    topk = draw(st.integers(2, 8))
    heads, groups = draw(st.sampled_from(((2, 1), (4, 2), (4, 4))))
    experts = draw(st.integers(3, 8))
    return config(
        roles,
        candidates=draw(st.booleans()),
        engram=sorted(draw(st.sets(layers, max_size=2))),
        ngram=draw(st.integers(2, 4)),
        stages=stages,
        taps=sorted(draw(st.sets(layers, min_size=1, max_size=2))),
        sliding_window=window,
        head_dim=draw(st.sampled_from((32, 64))),
        num_attention_heads=heads,
        o_groups=groups,
        index_topk=topk,
        candidate_block_size=block,
        candidate_topk_blocks=-(-(topk - 1) // block) + 1,  # the fewest that always hold index_topk entries
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, 3)),
        dspark_block_size=draw(st.integers(1, 4)) if stages else 0,
    )


@lru_cache(maxsize=4)
def params(cfg: ModelConfig, numerics: str, weights: str = "dense") -> transformer.ModelParams:
    """Random parameters, also where training starts from all zeros or ones: norms, sinks, biases."""
    made = dict(tree.walk(checkpoint.random(cfg, 0, numerics, weights)))

    def leaf(path: str, spec: tree.Spec) -> Tensor | Quantized:
        if spec.init == "normal":
            return made[path]
        return made[path] + 0.2 * tree.draw(tree.Spec(spec.shape), 1, path).to(made[path].dtype)

    return tree.build(leaf, transformer.specs(cfg))


def model(
    cfg: ModelConfig, numerics: str = "fp32", cache: str = "plain", batch_invariant: bool = True,
    kernels: str = "reference", weights: str = "dense",
) -> Model:  # fmt: skip
    rt = Runtime(numerics, cache, batch_invariant, choose(kernels))
    layout = Layout(cfg, cache, PAGE)
    return transformer.assemble(cfg, rt, layout, params(cfg, numerics, weights), constants(cfg))


def runner(cfg: ModelConfig, *how, pages: int = 16, slots: int = 6, **more) -> Runner:
    return Runner(model(cfg, *how, **more), pages, slots)


@dataclass(frozen=True)
class Seq:
    """Tokens of one sequence and where it lives."""

    tokens: np.ndarray
    slot: int = 1
    pages: tuple[int, ...] = (5, 2, 9)

    def span(self, begin: int, end: int, **more: int) -> Span:
        return Span(self.tokens[begin:end], begin, self.slot, self.pages, **more)


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def step(r: Runner, *spans: Span) -> list[Tensor]:
    """Logits [n, V] of every row of each span."""
    counts = [len(s.tokens) for s in spans]
    return list(r.step(spans, torch.arange(sum(counts)))[0].split(counts))


def play(r: Runner, seq: Seq, cuts: Sequence[int]) -> Tensor:
    """Logits [n, V] of a sequence run alone, a step for each stretch between ``cuts``."""
    return torch.cat([step(r, seq.span(a, b))[0] for a, b in pairwise(cuts)])


def every(chunk: int, total: int) -> list[int]:
    return [*range(0, total, chunk), total]


def by_release_name(cfg: ModelConfig) -> dict[str, Tensor]:
    """The fp32 parameters of ``params`` as the dense forward takes them: released names, a layer's experts stacked."""
    leaves, specs = dict(tree.walk(params(cfg, "fp32"))), dict(tree.walk(transformer.specs(cfg)))
    out = {}
    for entry in release.schema(cfg).values():
        if entry.part != "weight":
            continue
        leaf, name = leaves[entry.path], entry.name
        if isinstance(leaf, Quantized) and leaf.scale is not None:
            leaf = release.decode(specs[entry.path], leaf.weight, leaf.scale, torch.float32)
        elif isinstance(leaf, Quantized):
            leaf = leaf.weight
        if entry.expert is not None:
            name = name.removesuffix(".weight").replace(f".experts.{entry.expert}.", ".experts.")
        out[name] = leaf
    return out
