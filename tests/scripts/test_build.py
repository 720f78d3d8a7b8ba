"""From YAML to dataclasses: what is refused, and that what comes out is what was said."""

import dataclasses
import json
import re

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kernels.registry import OPS
from model import checkpoint, engram_tables
from scripts import build, memory
from scripts.build import build_settings
from scripts.entry import CONF
from serve.text import Text, normalise, train_bpe


def settings(*overrides: str) -> build.Settings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_settings(compose("config", overrides=list(overrides)), overrides)


def test_values_arrive():
    s = settings("numerics=fp32", "max_tokens=7", "temperature=1", "model.sliding_window=32", "kernels.linear=compile")
    assert s.numerics == "fp32"
    assert s.max_tokens == 7 and s.temperature == 1.0 and type(s.temperature) is float
    assert s.model.sliding_window == 32 and isinstance(s.model.compress_ratios, tuple) and s.model_chosen
    assert s.kernels.linear == "compile" and s.kernels.rms_norm == "reference"
    assert build.build_runtime(s).kernels is s.kernels
    assert not settings().model_chosen


def test_every_op_has_a_name_in_yaml():
    """In conf/kernels/reference.yaml, so that `kernels.NAME=backend` is a plain override; new ops need their line."""
    named = OmegaConf.load(CONF / "kernels" / "reference.yaml")
    assert set(named) == {"default", *OPS}
    assert set(settings("kernels=compile").kernels.names().values()) == {"compile"}


def test_every_root_key_has_a_comment():
    lines = (CONF / "config.yaml").read_text().partition("# The model\n")[2].partition("hydra:")[0].splitlines()
    bare = [line for line in lines if line and ":" in line and "#" not in line]
    obvious = {"device", "max_tokens", "evaluate", "prompt_tokens", "bench", "batch"}
    assert {line.split(":")[0].strip() for line in bare} <= obvious


BAD = [
    ("+bogus=1", "unknown key bogus; known: model, parallel, kernels, serve, track, api, workload, checkpoint,"),
    ("+serve.page=1", "unknown key serve.page; known in serve: page_size"),
    ("+kernels.fused=reference", "unknown key kernels.fused; known in kernels: default, "),
    ("+model.hidden=1", "unknown key model.hidden; known in model: vocab_size"),
    ("~model.hidden_size", r"model: lacks these fields: \['hidden_size'\]"),
    ("~serve.pages", "key serve.pages is missing"),
    ("model.head_dim=65", "head_dim must be a multiple of 32"),
    ("kernels.sparse_attention=cuda", "kernels.sparse_attention='cuda' is not available; sparse_attention has: "),
    ("kernels.default=cuda", "kernels.default='cuda' is not available; backends: compile, reference"),
    ("~track", "track must be one of none, wandb, got nothing"),
    ("~model", "model must be one of flash, tiny, got nothing"),
    ("evaluate=null", "evaluate must be a mapping of context, .* got None"),
    ("serve.pages=null", "serve.pages must be int, got None"),
    ("parallel.rules=null", "parallel.rules must be a list of"),
    ("checkpoint=''", "checkpoint is empty: give a folder"),
    ("golden=''", "golden is empty: give a folder"),
    ("model.engram_vocab_size=100", "model: engram_num_embeddings of layer 1 must be 1524"),
    ("max_tokens=many", "max_tokens must be int, got 'many'"),
    ("prompt=5", "prompt must be str or null, got 5"),
    ("speculate=1", "speculate must be bool, got 1"),
    ("numerics=fp64", "numerics must be one of"),
    ("weights=loose", "weights must be one of"),
    ("threads=0", "threads must be >= 1"),
    ("serve.pages=0", "serve.pages must be >= 1"),
    ("evaluate.stride=4096", "evaluate.stride must be <= evaluate.context"),
]


@pytest.mark.parametrize(("override", "message"), BAD, ids=[b[0] for b in BAD])
def test_bad_values(override, message):
    with pytest.raises(ValueError, match=message):
        settings(override)


def test_packed_cache_needs_qat():
    with pytest.raises(ValueError, match="cache=packed"):
        settings("cache=packed", "numerics=fp32")


@pytest.mark.parametrize("name", ["nonsense", "meta", "cpu:5", "cuda:99", "''"])
def test_device_that_is_not_there(name):
    with pytest.raises(ValueError, match=rf"device={name.strip(chr(39))} is not available; there is: cpu"):
        build.build_device(settings(f"device={name}"))


# --- memory ---

TOO_LARGE = [
    ("model=flash", "weights 1,336.6 GB.* take a smaller model, or weights=packed"),
    ("serve.pages=100000000", "cache .* lower serve.pages"),
    ("serve.max_batch=1000000000 serve.budget_tokens=1000000001", "cache .* serve.max_batch"),
    ("serve.page_size=6400000000000", "cache .* serve.page_size"),
    ("model.sliding_window=1000000000", "cache .* model.sliding_window"),
    ("model.vocab_size=10000000000", "weights .* take a smaller model"),
]


@pytest.mark.parametrize(("override", "message"), TOO_LARGE, ids=[t[0] for t in TOO_LARGE])
def test_too_large_is_refused_before_anything_is_made(override, message, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 10**11)
    monkeypatch.setattr(checkpoint, "random", lambda *a, **k: pytest.fail("weights were made"))
    with pytest.raises(ValueError, match=f"needs .*{message}") as error:
        build.build_model(settings("checkpoint=random", "threads=1", *override.split()))
    assert "cpu has 100.0 GB free" in str(error.value)


# --- checkpoints ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a small model with a byte tokenizer, written as training writes them."""
    where = tmp_path_factory.mktemp("checkpoint")
    text = train_bpe(["def f(n):\n    return n + 1\n"], 270)
    rows = [engram_tables.table_rows(t) for t in engram_tables.primes(2, 100, 4, 4)]
    values = OmegaConf.to_container(OmegaConf.load(CONF / "model" / "tiny.yaml")) | {
        "vocab_size": 270,
        "n_routed_experts": 4,
        "engram_vocab_size": 100,
        "engram_num_embeddings": rows,
        "engram_compressed_vocab_size": engram_tables.canonical_map(text.pieces(), text.raw_pieces(), normalise)[1],
    }
    cfg = build.build_model_config(values)
    checkpoint.save(where, cfg, checkpoint.random(cfg, 0, numerics="qat"))
    text.save(where)
    return where, cfg


def test_a_checkpoint_brings_its_model_and_tokenizer(folder):
    where, cfg = folder
    model, text = build.build_model(settings(f"checkpoint={where}", "threads=1"))
    assert model.cfg == cfg and text.vocab_size == cfg.vocab_size
    assert len(set(model.consts.token_map.tolist())) == cfg.engram_compressed_vocab_size


def test_another_model_than_the_checkpoints(folder):
    with pytest.raises(ValueError, match=r"model.vocab_size=2048 does not fit checkpoint=.* whose config.json has 270"):
        build.build_model(settings(f"checkpoint={folder[0]}", "model=tiny", "threads=1"))


def test_tokenizer_of_another_checkpoint(folder):
    where, cfg = folder
    other = dataclasses.replace(cfg, engram_compressed_vocab_size=200)
    with pytest.raises(ValueError, match=r"engram_compressed_vocab_size 200, tokenizer.json folds to"):
        build.token_map(settings(f"checkpoint={where}"), other, Text.load(where))
    other = dataclasses.replace(cfg, vocab_size=280)
    with pytest.raises(ValueError, match=f"{where}: tokenizer.json has 270 tokens, config.json has vocab_size 280"):
        build.build_text(settings(f"checkpoint={where}"), other)


def test_no_such_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="no such folder; give a folder in the released layout, `checkpoint=random`"):
        build.build_model(settings(f"checkpoint={tmp_path / 'gone'}", "threads=1"))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}}))
    with pytest.raises(ValueError, match=r"config\.json"):
        build.build_model(settings(f"checkpoint={tmp_path}", "threads=1"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+serve.pools.decode.serve.pagez=1"], "unknown key serve.pools.decode.serve.pagez"),
        (["+serve.pools.decode.serve.pages=-3"], "serve.pools.decode.serve.pages must be >= 1, got -3"),
        (["serve.pools.decode.role=cook"], "serve.pools.decode.role must be one of prefill, decode, both"),
        (["serve.pools.decode.groups=0"], "serve.pools.decode.groups must be >= 1"),
        (["+serve.pools.decode.serve.page_size=128"], "serve.pools.decode.serve.page_size: all pools share"),
        (["parallel.axes.dp=2", "parallel.eplb.enabled=true", "parallel.eplb.redundant=3"],
         "parallel.eplb.redundant must be a multiple of the 2 ranks, got 3"),
        (["parallel.eplb=null"], "parallel.eplb must be a mapping of"),
        (["serve.restart.build_s=0"], "serve.restart.build_s must be > 0"),
    ],
)  # fmt: skip
def test_pools_that_cannot_serve_are_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        settings("serve=disagg", *overrides)


def test_a_pool_needs_a_role_alone():
    assert settings("serve=disagg", "+serve.pools.more.role=both").pools["more"].serve == {}
