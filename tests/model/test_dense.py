"""The dense forward and drafter against the official code's fp32 numbers."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from kernels import quant
from model import dense, dense_dspark, dense_index
from model.config import ModelConfig
from tests.golden import read_weights

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LIMIT = 2e-5


class Case:
    def __init__(self, name: str):
        folder = GOLDEN / name
        self.cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
        self.params = read_weights(folder / "weights.safetensors", self.cfg)
        token_map = json.loads((folder / "engram_tables.json").read_text())["token_map"]
        self.tables = dense.hash_tables(self.cfg, token_map)
        self.inputs = {k: v.long() for k, v in load_file(folder / "inputs.safetensors").items()}
        self.expected = load_file(folder / "expected_fp32.safetensors")

    def forward(self, ids: torch.Tensor, numerics: dense.Numerics | None = None):
        rows = dense.hash_rows(self.cfg, self.tables, ids)
        run = dense.Pass(self.cfg, self.params, ids.shape[0], numerics or dense.Numerics(), trace=dense.Trace())
        return run, F.linear(dense.forward(run, ids, rows), self.params["head.weight"])


@pytest.fixture(scope="module", params=["tiny_batch", "tiny_dspark"])
def case(request) -> Case:
    return Case(request.param)


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_prefill(case):
    prompt, want = case.inputs["seq0.prompt"], case.expected
    rows = dense.hash_rows(case.cfg, case.tables, prompt)
    for i, layer in enumerate(case.cfg.engram_layer_ids):
        assert torch.equal(rows[i], want[f"seq0.prefill.layers.{layer}.engram_hash_ids"].long())
    run, logits = case.forward(prompt)
    assert worst(logits, want["seq0.prefill.logits_all"]) < LIMIT
    if run.trace.taps:
        assert worst(torch.cat(run.trace.taps, -1), want["seq0.prefill.main_hidden"]) < LIMIT


def test_decode_is_the_next_row_of_a_longer_prefill(case):
    prompt, fed = case.inputs["seq0.prompt"], case.inputs["seq0.decode_inputs"]
    _, logits = case.forward(torch.cat([prompt, fed], 1))
    for j in range(fed.shape[1]):
        assert worst(logits[:, prompt.shape[1] + j], case.expected[f"seq0.decode.{j}.logits"]) < LIMIT


def test_drafts_and_confidence():
    case = Case("tiny_dspark")
    prompt, fed = case.inputs["seq0.prompt"], case.inputs["seq0.decode_inputs"]
    run, _ = case.forward(torch.cat([prompt, fed], 1))
    features = dense_dspark.context(run, run.trace.taps)
    for j in range(fed.shape[1]):
        key = f"seq0.decode.{j}.spec."
        ids = case.expected[key + "output_ids"].long()
        last = torch.tensor([[prompt.shape[1] + j]])
        y, _ = dense_dspark.draft(run, features, ids[:, :1], last)
        logits = dense_dspark.logits(run, y, ids[:, None, :-1])
        assert torch.equal(logits.argmax(-1)[0], ids[:, 1:])
        assert worst(logits[0], case.expected[key + "logits"]) < LIMIT
        assert worst(dense_dspark.confidence(run, y, ids[:, None, :-1])[0], case.expected[key + "confidence"]) < LIMIT


def test_quantisers_are_in_force(case):
    numerics = dense.Numerics(quant.fake_fp8, quant.fake_nvfp4, quant.fake_mxfp4)
    prompt = case.inputs["seq0.prompt"]
    _, exact = case.forward(prompt)
    _, rounded = case.forward(prompt, numerics)
    difference = (exact - rounded).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert 1e-3 < difference < 0.7


def test_hash_tables_refuse_a_foreign_tokenizer(case):
    with pytest.raises(ValueError, match="engram_compressed_vocab_size"):
        dense.hash_tables(case.cfg, [0, 1, 2])


def test_the_lowest_of_equal_entries_is_taken():
    scores = torch.tensor([[0.0, 2.0, 0.0, -torch.inf, 0.0], [-torch.inf] * 4 + [1.0], [3.0, 1.0, 3.0, 3.0, 1.0]])
    want = [[1, 1, 1, 0, 0], [0, 0, 0, 0, 1], [1, 0, 1, 1, 0]]
    assert dense_index.largest(scores, 3).int().tolist() == want
    assert dense_index.largest(scores[:, :0], 0).shape == (3, 0)
