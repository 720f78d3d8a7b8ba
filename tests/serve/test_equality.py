"""The shipped checkpoint, fp32 and batch-invariant: hundreds of requests give the same tokens whatever the loop does.

Long, so `slow`; tests/serve/test_engine.py states the same on a small random model.
"""

from pathlib import Path

import numpy as np
import pytest

from kernels import choose
from model import checkpoint, engram_tables
from model.cache import Layout
from model.constants import constants
from model.runtime import Runtime
from model.transformer import Model, assemble
from serve.request import Sampling
from serve.text import Text, normalise
from tests.serve.harness import Bench

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "model" / "checkpoints" / "tiny"
REQUESTS, TOKENS = 100, 20
HALO = 7 * 64  # what window=halo recomputes of the shipped model


@pytest.fixture(scope="module")
def model() -> Model:
    cfg, text = checkpoint.read_config(SHIPPED), Text.load(SHIPPED)
    ids, _ = engram_tables.canonical_map(text.pieces(), text.raw_pieces(), normalise)
    rt = Runtime("fp32", "plain", True, choose("reference"))
    layout = Layout(cfg, "plain", 64)
    params = checkpoint.load(SHIPPED, cfg, numerics="fp32", weights="dense", device="cpu")
    return assemble(cfg, rt, layout, params, constants(cfg, ids))


@pytest.fixture(scope="module")
def asks() -> list[tuple[np.ndarray, Sampling]]:
    """Passages of this repository, half of them behind one of two long common beginnings; greedy and sampled."""
    text = Text.load(SHIPPED)
    source = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "serve").glob("*.py")))
    ids, rng = np.array(text.encode(source), np.int32), np.random.default_rng(0)
    heads = [ids[at : at + HALO + 200] for at in (0, 5000)]
    made = []
    for i in range(REQUESTS):
        at, n = int(rng.integers(0, len(ids) - 300)), int(rng.integers(1, 200))
        prompt = ids[at : at + n]
        if i % 4 == 0:
            prompt = np.concatenate((heads[i % 8 // 4], prompt))
        made.append((prompt, Sampling(TOKENS, 0.8 * (i % 2), seed=i)))
    return made


@pytest.fixture(scope="module")
def alone(model, asks) -> list[list[int]]:
    bench = Bench(model, pages=64, max_batch=1, budget_tokens=512)
    return [bench.run(ask)[0] for ask in asks]


WAYS = {
    "among 32 others": {"max_batch": 32},
    "drafted, whole block": {"max_batch": 32, "speculate": True},
    "drafted, block of 1, small chunks": {"max_batch": 16, "speculate": True, "block": 1, "long_prefill_tokens": 37},
    "drafted, block of 2, adaptive, overlapped": {
        "max_batch": 32, "speculate": True, "block": 2, "speculation": {"adaptive": True}, "overlap": 1,
    },
    "drafted, block of 3, preempted": {"max_batch": 32, "speculate": True, "block": 3, "pages": 40},
    "prefix hits, exact halo": {"max_batch": 32, "window": "halo", "speculate": True},
}  # fmt: skip


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_hundreds_of_requests_keep_their_tokens(model, asks, alone, how):
    bench = Bench(model, **{"pages": 400, "budget_tokens": 512, **how})
    got = bench.run(*asks)
    assert [i for i, (g, w) in enumerate(zip(got, alone, strict=True)) if g != w] == []
    if how.get("pages"):
        assert bench.engine.stats()["preempted_total"] > 0
    if how.get("window"):
        assert bench.engine.stats()["hit_tokens_total"] > 5 * HALO
