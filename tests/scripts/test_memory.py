"""Bytes from shapes are the bytes that are taken; what is free is a number."""

import pytest
import torch

from model import checkpoint, tree
from model.cache import Layout
from model.runtime import Runtime
from model.tree import Quantized
from parallel import plan
from parallel.eplb.settings import Eplb
from scripts import memory
from tests.small import config


def held(params) -> int:
    parts = [
        t for _, leaf in tree.walk(params) for t in (leaf.__dict__.values() if isinstance(leaf, Quantized) else [leaf])
    ]
    return sum(t.nbytes for t in parts if t is not None)


@pytest.mark.parametrize("weights", ["dense", "packed"])
@pytest.mark.parametrize("numerics", ["fp32", "qat"])
def test_weights(numerics, weights):
    cfg = config()
    told = memory.model_bytes(cfg, numerics, weights, drawn=False)
    assert told == {"weights": held(checkpoint.random(cfg, 0, numerics, weights))}


def test_tables_that_a_node_shares_count_once():
    cfg = config()
    how = plan.parse({"ep": 2}, [["layers.*.engram.embed", "host"], ["*", "replicate"]])
    whole, first, other = (
        memory.model_bytes(cfg, "qat", "dense", False, *more)["weights"]
        for more in ((), (how, 0, True), (how, 1, False))
    )
    tables = sum(rows * (cfg.engram_head_dim + cfg.engram_head_dim // 32) for rows in cfg.engram_num_embeddings)
    assert whole == first == other + tables


@pytest.mark.parametrize("rank", [0, 1])
def test_second_replicas_of_experts_are_counted(rank):
    cfg = config()
    rules = [["*.experts.*", {"shard": 0, "axis": "ep"}], ["*", "replicate"]]
    how = plan.parse({"ep": 2}, rules, eplb=Eplb(enabled=True, redundant=2))
    told = memory.model_bytes(cfg, "qat", "packed", False, how, rank)
    made = checkpoint.random(cfg, 0, "qat", "packed", plan=how, rank=rank, redundant=2)
    assert told == {"weights": held(made)}


def test_the_largest_weight_is_drawn_in_fp32():
    cfg = config(vocab_size=4096)
    told = memory.model_bytes(cfg, "qat", "dense", drawn=True)
    assert told["largest weight while it is drawn"] == 4 * 4096 * cfg.hidden_size


@pytest.mark.parametrize("storage", ["plain", "packed"])
def test_cache(storage):
    cfg, dtype = config(), Runtime(numerics="qat", cache=storage).dtype
    layout = Layout(cfg, storage)
    cache = layout.allocate(5, 3, dtype)
    pools = (cache.pages, cache.rings, cache.tails, cache.tokens)
    assert memory.cache_bytes(layout, 5, 3, dtype) == {"cache": sum(t.nbytes for t in pools)}


def test_require_names_parts_and_remedy(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "available", lambda device: 3 * 10**9)
    memory.require({"weights": 10**9, "cache": 2 * 10**9}, cpu)
    with pytest.raises(
        ValueError, match=r"needs 3\.1 GB \(weights 1\.1 GB, cache 2\.0 GB\), cpu has 3\.0 GB free: lower"
    ):
        memory.require({"weights": 11 * 10**8, "cache": 2 * 10**9}, cpu)


def test_available_is_within_the_machine(monkeypatch, tmp_path):
    there = memory.available(torch.device("cpu"))
    assert 10**7 < there < 10**14
    (tmp_path / "limit").write_text("5000000\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(memory, "LIMITS", (str(tmp_path / "none"), str(tmp_path / "gone"), str(tmp_path / "limit")))
    assert memory.available(torch.device("cpu")) == 5_000_000
