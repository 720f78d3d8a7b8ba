"""The model's configuration: DeepSeek's field names (`config.json`), checked; layer roles derived from them."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from model import consistency
from model.consistency import TOKENS

# Fields of a released config.json that do not change the text model's numbers, or may hold one value only.
IGNORED_ROOT = {
    "architectures", "dtype", "torch_dtype", "transformers_version", "auto_map", "vision_config", "image_token_id",
    "image_start_token_id", "image_end_token_id", "image_newline_token_id", "aligner_config", "projector_config",
    "tie_word_embeddings", "use_cache", "initializer_range",
}  # fmt: skip
IGNORED_TEXT = {"model_type", "attention_dropout", "use_cache", "initializer_range", "dtype", "torch_dtype"}
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
        consistency.check(self)

    # --- layer roles (spec section 1) ---

    @property
    def engram_columns(self) -> int:
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

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
