"""Every mistake in a config is an error that names the field; the released form goes both ways."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from model.config import LayerKind, ModelConfig

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASES = ("tiny_batch", "tiny_dspark")
DROP = object()


def root(case: str = "tiny_dspark") -> dict[str, Any]:
    return json.loads((GOLDEN / case / "config.json").read_text())


def changed(**text: Any) -> ModelConfig:
    """tiny_dspark (8 layers, sources 1, 3, 4) with some text fields changed or dropped."""
    r = root()
    for key, value in text.items():
        r["text_config"][key] = value
        if value is DROP:
            del r["text_config"][key]
    return ModelConfig.from_hf(r)


@pytest.mark.parametrize("case", CASES)
def test_released_form_goes_both_ways(case):
    cfg = ModelConfig.from_hf(root(case))
    again = cfg.to_hf()
    assert ModelConfig.from_hf(again) == cfg
    assert ModelConfig.from_hf(json.loads(json.dumps(again))) == cfg
    for key, value in again["text_config"].items():  # nothing the release has is lost
        assert root(case)["text_config"][key] == value, key


def test_roles_follow_from_the_lists():
    cfg = changed()
    assert cfg.kind(0) == LayerKind()
    assert cfg.kind(1) == LayerKind(ratio=2, source_ratio=2, reads=True, index=True)
    assert cfg.kind(2) == LayerKind(reads=True)
    assert cfg.kind(4) == LayerKind(ratio=1, source_ratio=1, reads=True, index=True, publishes=True)
    assert cfg.kind(6) == LayerKind(source_ratio=1, reads=True, index=True, obeys=True)
    assert [cfg.source_of(i) for i in range(9)] == [None, 1, 1, 3, 4, 4, 4, 4, None]
    assert cfg.last_source == 4 and cfg.tail_sources == (1, 3) and cfg.num_rings == 11


def test_hashable():
    assert hash(changed()) == hash(changed())


REQUIRED = [
    f.name
    for f in dataclasses.fields(ModelConfig)
    if f.name not in ("bos_token_id", "eos_token_id", "pad_token_id")  # at the root, where they have defaults
]


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field(name):
    with pytest.raises(ValueError, match=rf"text_config lacks \['{name}'\]"):
        changed(**{name: DROP})


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", ["8", None, True], ids=str)
def test_wrong_type(name, value):
    with pytest.raises(ValueError, match=f"config.json: {name} must be"):
        changed(**{name: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # unknown, or of one value only
        ({"window_size": 8}, "unknown field text_config.window_size = 8; known: "),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1, got 2"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be 'sqrtsoftplus', got 'sigmoid'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must be 1, got 4"),
        # types
        ({"hidden_size": 64.0}, "hidden_size must be an integer, got 64.0"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit must be a number, got nan"),
        ({"kv_source_layer_ids": 1}, "kv_source_layer_ids must be a list of integers, got 1"),
        ({"kv_source_layer_ids": [1, "3"]}, "kv_source_layer_ids must be a list of integers"),
        ({"rope_scaling": {"factor": "16"}}, "rope_scaling.factor must be a number > 0, got '16'"),
        ({"rope_scaling": {"factor": 0}}, "rope_scaling.factor must be a number > 0, got 0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.rope_type must be 'yarn', got 'linear'"),
        ({"rope_scaling": {"mscale": 1}}, "rope_scaling must be an object with fields of"),
        # sizes
        ({"hidden_size": 0}, "hidden_size must be >= 1, got 0"),
        ({"hidden_size": 48}, r"hidden_size must be a multiple of 32 \(quantisation groups\), got 48"),
        ({"num_attention_heads": 5}, "num_attention_heads must divide by o_groups, got 5 and 2"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim must be even and <= 32, got 15"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim must be even and <= 32, got 64"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be <= n_routed_experts, got 7 and 6"),
        ({"swiglu_limit": 0}, "swiglu_limit must be > 0, got 0"),
        ({"rope_theta": -1.0}, "rope_theta must be > 0, got -1.0"),
        # layers
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1]}, "compress_ratios must have 11 entries .*, got 8"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 4, 0, 0, 0]}, r"must hold 0, 1 or 2, got \[0, 1, 2, 4\]"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0]}, r"of DSpark stages must be 0, got \(1, 0, 0\)"),
        ({"compress_ratios": [1, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0]}, "layer 0 reads compressed KV but no kv_source"),
        ({"compress_ratios": [0, 2, 1, 2, 1, 1, 1, 1, 0, 0, 0]}, r"compress_ratios\[2\] = 1 but its kv source 1 has 2"),
        ({"kv_source_layer_ids": [1, 3, 8]}, r"kv_source_layer_ids must lie in 0\.\.7, got 8"),
        ({"kv_source_layer_ids": [-1, 3, 4]}, r"kv_source_layer_ids must lie in 0\.\.7, got -1"),
        ({"kv_source_layer_ids": []}, "kv_source_layer_ids must be ascending and not empty"),
        ({"kv_source_layer_ids": [3, 1, 4]}, r"kv_source_layer_ids must be ascending.*got \(3, 1, 4\)"),
        ({"kv_source_layer_ids": [0, 1, 3, 4]}, "kv_source_layer_ids holds layer 0, whose compress_ratio is 0"),
        ({"index_source_layer_ids": [1, 3, 6]}, "kv source layer 4 must be in index_source_layer_ids"),
        ({"index_source_layer_ids": [1, 3, 4, 9]}, r"index_source_layer_ids must lie in 0\.\.7, got 9"),
        ({"candidate_source_layer_id": 6}, r"must be one of kv_source_layer_ids \(1, 3, 4\) or -1, got 6"),
        ({"candidate_source_layer_id": 3}, r"kv sources \[4\] lie after candidate_source_layer_id 3"),
        ({"candidate_block_size": 0}, "candidate_topk_blocks and _block_size must be >= 1, got 4, 0"),
        # Engram
        ({"engram_num_embeddings": [252]}, "engram_num_embeddings must have one entry per engram layer"),
        ({"engram_num_embeddings": [252, 0]}, "engram_num_embeddings must be >= 1"),
        ({"engram_layer_ids": [1, 8]}, r"engram_layer_ids must lie in 0\.\.7, got 8"),
        ({"engram_layer_ids": [3, 1]}, "engram_layer_ids must be ascending"),
        ({"engram_num_embeddings": [252, 400]}, r"engram_num_embeddings of layer \d must be \d+ .sum of the primes"),
        ({"engram_vocab_size": 2**40}, r"engram_vocab_size must be in 2\.\.4294967296, got 1099511627776"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be >= 2, got 1"),
        ({"engram_head_dim": 40}, "engram_head_dim must be a multiple of 32, got 40"),
        ({"engram_pad_token_id": 128}, "engram_pad_token_id must be a token id below 128, got 128"),
        ({"engram_compressed_vocab_size": 129}, r"engram_compressed_vocab_size must be in 1\.\.128, got 129"),
        # drafter
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be >= 0, got -1"),
        ({"dspark_block_size": 0}, "dspark_block_size must be >= 1, got 0"),
        ({"dspark_block_size": 9}, "dspark_block_size must be <= sliding_window, got 9"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids must not be empty"),
        ({"dspark_target_layer_ids": [5, 8]}, r"dspark_target_layer_ids must lie in 0\.\.7, got 8"),
        ({"dspark_noise_token_id": 128}, "dspark_noise_token_id must be a token id below 128, got 128"),
        ({"dspark_num_experts_per_tok": 5}, r"dspark_num_experts_per_tok must be in 1\.\.4, got 5"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank must be >= 1, got 0"),
    ],
    ids=lambda v: ",".join(f"{k}={x}" for k, x in v.items()) if isinstance(v, dict) else "",
)
def test_inconsistent_field(text, message):
    with pytest.raises(ValueError, match=message):
        changed(**text)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("text_config", DROP, "'text_config' is missing"),
        ("text_config", [1], "'text_config' is missing or not an object"),
        ("quantization_config", DROP, "'quantization_config' is missing"),
        ("quantization_config", "fp8", "'quantization_config' is missing or not an object"),
        ("quantization_config", {"quant_method": "awq"}, "quantization_config.quant_method must be 'fp8', got 'awq'"),
        ("model_type", "deepseek_v3", "model_type must be 'deepseek_v41', got 'deepseek_v3'"),
        ("tie_word_embeddings", True, "tie_word_embeddings must be False, got True"),
        ("num_experts", 3, "unknown field 'num_experts' = 3"),
        ("bos_token_id", 128, "bos_token_id must be a token id below 128, got 128"),
        ("eos_token_id", [], "eos_token_id must be an integer"),
    ],
)
def test_root(key, value, message):
    r = root()
    r[key] = value
    if value is DROP:
        del r[key]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(r)


def test_fields_that_do_not_matter_are_ignored():
    r = root()
    r |= {"vision_config": {}, "image_token_id": 120, "eos_token_id": [1, 5]}
    assert ModelConfig.from_hf(r) == ModelConfig.from_hf(root())
