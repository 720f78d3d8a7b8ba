"""The model's configuration: DeepSeek's field names (`config.json`), checked; layer roles derived from them."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

# Fields of a released config.json that do not change the text model's numbers, or may hold one value only.
IGNORED_ROOT = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "auto_map", "vision_config", "image_token_id",
    "image_start_token_id", "image_end_token_id", "image_newline_token_id", "aligner_config", "projector_config",
    "tie_word_embeddings", "use_cache", "initializer_range",
}  # fmt: skip
IGNORED_TEXT = {"model_type", "attention_dropout", "use_cache", "initializer_range", "dtype", "torch_dtype"}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # at the root, with defaults
FIXED = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "gate_temp": 1.0,
}
QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


@dataclass(frozen=True)
class RopeScaling:
    """YaRN of the layers that read compressed KV (spec section 5.1)."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rope_type: str = "yarn"

    def __post_init__(self):
        if self.rope_type != "yarn":
            raise ValueError(f"rope_scaling.rope_type must be 'yarn', got {self.rope_type!r}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "rope_type" and not (_is_number(value) and value > 0):
                raise ValueError(f"rope_scaling.{f.name} must be a number > 0, got {value!r}")


@dataclass(frozen=True)
class LayerKind:
    """What a layer does beyond the window: one compiled graph per distinct kind.

    ``ratio`` is that of the cache it *writes* (0 = writes none); ``reads`` whether it attends to compressed KV;
    ``index`` whether it owns indexer queries; ``publishes`` / ``obeys``: the candidate blocks of spec section 6.4.
    """

    ratio: int = 0
    source_ratio: int = 0
    reads: bool = False
    index: bool = False
    publishes: bool = False
    obeys: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """One DeepSeek-V4.1 text model. Raises ValueError naming the field, its value and what would do."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2

    def __post_init__(self):
        for check in (_check_sizes, _check_layers, _check_engram, _check_drafter):
            check(self)

    # --- layer roles (spec section 1) ---

    @property
    def engram_columns(self) -> int:
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def kv_sources(self) -> tuple[int, ...]:
        return self.kv_source_layer_ids

    @property
    def last_source(self) -> int:
        """The last layer that owns global KV; layers after it need only a prompt's last window of rows."""
        return max(self.kv_source_layer_ids)

    @property
    def num_rings(self) -> int:
        """Layers with a window ring: the backbone's, then the drafter's stages."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def ring_size(self) -> int:
        """Window plus one draft block: a rejected draft never overwrites a row that is still visible."""
        return self.sliding_window + max(self.dspark_block_size, 1)

    @property
    def tail_sources(self) -> tuple[int, ...]:
        """Sources whose groups span two tokens, which keep a pending token."""
        return tuple(s for s in self.kv_source_layer_ids if self.compress_ratios[s] == 2)

    def source_of(self, layer: int) -> int | None:
        """The layer whose compressed KV ``layer`` reads, None for a window-only layer."""
        if layer >= self.num_hidden_layers or self.compress_ratios[layer] == 0:
            return None
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def kind(self, layer: int) -> LayerKind:
        """The static role of a backbone layer; stages of the drafter are plain window layers."""
        source = self.source_of(layer)
        if source is None:
            return LayerKind()
        index = layer in self.index_source_layer_ids
        return LayerKind(
            ratio=self.compress_ratios[layer] if layer == source else 0,
            source_ratio=self.compress_ratios[source] if index else 0,
            reads=True,
            index=index,
            publishes=layer == self.candidate_source_layer_id,
            obeys=index and layer > self.candidate_source_layer_id >= 0,
        )

    # --- released form ---

    @classmethod
    def from_hf(cls, root: dict[str, Any]) -> "ModelConfig":
        """Build from a released ``config.json``. Unknown, missing and inconsistent fields are errors."""
        text = root.get("text_config")
        if not isinstance(text, dict):
            raise ValueError("config.json: 'text_config' is missing or not an object")
        names = {f.name: f for f in fields(cls)}
        tokens = {k: root[k] for k in TOKENS if k in root}
        for key in root:
            if key not in IGNORED_ROOT | tokens.keys() | {"text_config", "quantization_config", "model_type"}:
                raise ValueError(f"config.json: unknown field {key!r} = {root[key]!r}")
            if key in FIXED and root[key] != FIXED[key]:
                raise ValueError(f"config.json: {key} must be {FIXED[key]!r}, got {root[key]!r}")
        if root.get("model_type", "deepseek_v41") != "deepseek_v41":
            raise ValueError(f"config.json: model_type must be 'deepseek_v41', got {root['model_type']!r}")
        stored = root.get("quantization_config")
        if not isinstance(stored, dict):
            raise ValueError("config.json: 'quantization_config' is missing or not an object")
        for key, want in QUANTIZATION.items():
            got = stored.get(key)
            if got != want:
                raise ValueError(f"config.json: quantization_config.{key} must be {want!r}, got {got!r}")
        values = {}
        for key, value in {**tokens, **text}.items():
            if key in FIXED:
                if value != FIXED[key]:
                    raise ValueError(f"config.json: {key} must be {FIXED[key]!r}, got {value!r}")
            elif key in names:
                values[key] = _typed(key, value, names[key].type)
            elif key not in IGNORED_TEXT:
                raise ValueError(f"config.json: unknown field text_config.{key} = {value!r}; known: {sorted(names)}")
        missing = sorted(n for n in names if n not in values and n not in TOKENS)
        if missing:
            raise ValueError(f"config.json: text_config lacks {missing}")
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The released form of this config; ``from_hf(to_hf())`` is the identity."""
        text: dict[str, Any] = {"model_type": "deepseek_v41_text"}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in TOKENS:
                text[f.name] = list(value) if isinstance(value, tuple) else value
        scaling = self.rope_scaling
        text["rope_scaling"] = {f.name: getattr(scaling, f.name) for f in fields(scaling)}
        text.update({k: v for k, v in FIXED.items() if k != "gate_temp"})
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "dtype": "bfloat16",
            "text_config": text,
            "quantization_config": dict(QUANTIZATION),
        }


def _typed(key: str, value: Any, kind: Any) -> Any:
    if kind is RopeScaling or key == "rope_scaling":
        known = {f.name for f in fields(RopeScaling)}
        if not isinstance(value, dict) or not set(value) <= known:
            raise ValueError(
                f"config.json: rope_scaling must be an object with fields of {sorted(known)}, got {value!r}"
            )
        return RopeScaling(**value)
    if kind == tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or not all(type(v) is int for v in value):
            raise ValueError(f"config.json: {key} must be a list of integers, got {value!r}")
        return tuple(value)
    if key == "eos_token_id" and isinstance(value, list) and value:
        value = value[0]
    if not _is_number(value) or (kind is int and type(value) is not int):
        raise ValueError(f"config.json: {key} must be {'an integer' if kind is int else 'a number'}, got {value!r}")
    return kind(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check_sizes(c: ModelConfig) -> None:
    positive = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups "
        "o_lora_rank sliding_window n_routed_experts num_experts_per_tok moe_intermediate_size hc_mult "
        "hc_sinkhorn_iters max_position_embeddings index_n_heads index_head_dim index_topk"
    )
    for name in positive.split():
        _require(getattr(c, name) >= 1, f"{name} must be >= 1, got {getattr(c, name)}")
    for name in ("hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size", "index_head_dim"):
        value = getattr(c, name)
        _require(value % 32 == 0, f"{name} must be a multiple of 32 (quantisation groups), got {value}")
    for name in (
        "swiglu_limit",
        "routed_scaling_factor",
        "rope_theta",
        "compress_rope_theta",
        "rms_norm_eps",
        "hc_eps",
    ):
        _require(getattr(c, name) > 0, f"{name} must be > 0, got {getattr(c, name)}")
    for name in TOKENS:
        token = getattr(c, name)
        _require(0 <= token < c.vocab_size, f"{name} must be a token id below {c.vocab_size}, got {token}")
    heads, groups = c.num_attention_heads, c.o_groups
    _require(heads % groups == 0, f"num_attention_heads must divide by o_groups, got {heads} and {groups}")
    wide = groups * c.o_lora_rank
    _require(wide % 32 == 0, f"o_groups * o_lora_rank must be a multiple of 32 (quantisation groups), got {wide}")
    rope = c.qk_rope_head_dim
    smaller = min(c.head_dim, c.index_head_dim)
    _require(rope % 2 == 0 and rope <= smaller, f"qk_rope_head_dim must be even and <= {smaller}, got {rope}")
    k, e = c.num_experts_per_tok, c.n_routed_experts
    _require(k <= e, f"num_experts_per_tok must be <= n_routed_experts, got {k} and {e}")


def _check_layers(c: ModelConfig) -> None:
    stages = c.num_nextn_predict_layers
    _require(stages >= 0, f"num_nextn_predict_layers must be >= 0, got {stages}")
    n, ratios = c.num_hidden_layers, c.compress_ratios
    want = n + c.num_nextn_predict_layers
    _require(
        len(ratios) == want, f"compress_ratios must have {want} entries (layers + DSpark stages), got {len(ratios)}"
    )
    _require(set(ratios) <= {0, 1, 2}, f"compress_ratios must hold 0, 1 or 2, got {sorted(set(ratios))}")
    _require(not any(ratios[n:]), f"compress_ratios of DSpark stages must be 0, got {ratios[n:]}")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, name)
        _require(list(ids) == sorted(set(ids)) and ids != (), f"{name} must be ascending and not empty, got {ids}")
        for s in ids:
            _require(0 <= s < n, f"{name} must lie in 0..{n - 1}, got {s}")
            _require(ratios[s] > 0, f"{name} holds layer {s}, whose compress_ratio is 0")
    for s in c.kv_source_layer_ids:
        _require(s in c.index_source_layer_ids, f"kv source layer {s} must be in index_source_layer_ids")
    for layer in range(n):
        if ratios[layer]:
            sources = [s for s in c.kv_source_layer_ids if s <= layer]
            _require(bool(sources), f"layer {layer} reads compressed KV but no kv_source_layer_id is at or before it")
            got, have = ratios[layer], ratios[sources[-1]]
            _require(got == have, f"compress_ratios[{layer}] = {got} but its kv source {sources[-1]} has {have}")
    cand = c.candidate_source_layer_id
    if cand >= 0:
        known = (
            f"candidate_source_layer_id must be one of kv_source_layer_ids {c.kv_source_layer_ids} or -1, got {cand}"
        )
        _require(cand in c.kv_source_layer_ids, known)
        later = [s for s in c.kv_source_layer_ids if s > cand]
        _require(not later, f"kv sources {later} lie after candidate_source_layer_id {cand}")
        blocks, size = c.candidate_topk_blocks, c.candidate_block_size
        _require(blocks >= 1 and size >= 1, f"candidate_topk_blocks and _block_size must be >= 1, got {blocks}, {size}")


def _check_engram(c: ModelConfig) -> None:
    ids, rows = c.engram_layer_ids, c.engram_num_embeddings
    _require(len(ids) == len(rows), f"engram_num_embeddings must have one entry per engram layer {ids}, got {rows}")
    _require(list(ids) == sorted(set(ids)), f"engram_layer_ids must be ascending, got {ids}")
    for layer in ids:
        last = c.num_hidden_layers - 1
        _require(0 <= layer <= last, f"engram_layer_ids must lie in 0..{last}, got {layer}")
    if ids:
        _require(min(rows) >= 1, f"engram_num_embeddings must be >= 1, got {rows}")
        _require(c.engram_n_heads >= 1, f"engram_n_heads must be >= 1, got {c.engram_n_heads}")
        _require(c.engram_vocab_size >= 2, f"engram_vocab_size must be >= 2, got {c.engram_vocab_size}")
        size = c.engram_compressed_vocab_size
        _require(1 <= size <= c.vocab_size, f"engram_compressed_vocab_size must be in 1..{c.vocab_size}, got {size}")
        _require(c.engram_max_ngram_size >= 2, f"engram_max_ngram_size must be >= 2, got {c.engram_max_ngram_size}")
        _require(c.engram_head_dim % 32 == 0, f"engram_head_dim must be a multiple of 32, got {c.engram_head_dim}")
        pad, v = c.engram_pad_token_id, c.vocab_size
        _require(0 <= pad < v, f"engram_pad_token_id must be a token id below {v}, got {pad}")


def _check_drafter(c: ModelConfig) -> None:
    if c.num_nextn_predict_layers == 0:
        return
    _require(c.dspark_block_size >= 1, f"dspark_block_size must be >= 1, got {c.dspark_block_size}")
    _require(
        c.dspark_block_size <= c.sliding_window,
        f"dspark_block_size must be <= sliding_window, got {c.dspark_block_size}",
    )
    _require(bool(c.dspark_target_layer_ids), "dspark_target_layer_ids must not be empty")
    for layer in c.dspark_target_layer_ids:
        last = c.num_hidden_layers - 1
        _require(0 <= layer <= last, f"dspark_target_layer_ids must lie in 0..{last}, got {layer}")
    _require(c.dspark_markov_rank >= 1, f"dspark_markov_rank must be >= 1, got {c.dspark_markov_rank}")
    noise = c.dspark_noise_token_id
    _require(0 <= noise < c.vocab_size, f"dspark_noise_token_id must be a token id below {c.vocab_size}, got {noise}")
    k, e = c.dspark_num_experts_per_tok, c.dspark_n_routed_experts
    _require(1 <= k <= e, f"dspark_num_experts_per_tok must be in 1..{e}, got {k}")
