"""Evaluations: every byte counted once, loops found, the same text drafted and undrafted."""

import shutil
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.pack import Span
from scripts import build, evaluate
from scripts.bytetext import ByteText
from scripts.evaluation import acceptance, loss
from serve.request import Sampling
from tests.scripts.test_generate import settings as configure

TEXT = ByteText(2048, 0, 1)


@pytest.fixture(scope="module")
def runner():
    return build.build_runner(configure("serve.pages=16", "serve.max_batch=4"))[0]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 64))
def test_windows_count_every_prediction_once(tokens, context, stride):
    stride = min(stride, context)
    cut = list(loss.windows(tokens, context, stride))
    assert [r for w in cut for r in range(w.scored, w.end)] == list(range(tokens))
    assert all(w.begin <= w.scored and w.end - w.begin <= context for w in cut)
    assert all(w.scored - w.begin >= min(context - stride, w.scored) for w in cut)


def test_bits_are_those_of_the_whole_sequence(runner):
    """One window that holds the whole piece, against logits of one long step."""
    piece = b"def f(n):\n    return [n] * 3\n"
    seen = []
    got = loss.bits_per_byte(runner, TEXT, piece, 256, 256, 2, seen.append)
    ids = loss.sequence(TEXT, piece)
    rows = torch.arange(len(ids) - 1)
    logits, _ = runner.step([Span(ids[:-1], 0, 1, (1, 2))], rows)
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum") / np.log(2) / len(piece)
    assert got == pytest.approx(float(want), rel=1e-5) and sum(seen) == len(piece)


def test_chunks_and_batches_change_nothing(runner, monkeypatch):
    piece = bytes(range(32, 127)) * 2
    whole = loss.bits_per_byte(runner, TEXT, piece, 64, 32, 1, lambda n: None)
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 24)
    assert loss.bits_per_byte(runner, TEXT, piece, 64, 32, 4, lambda n: None) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("context", "batch", "message"),
    [(256, 5, "evaluate.batch must be <= serve.max_batch 4"), (512, 4, "need 32 pages"), (10**6, 1, "max_position")],
)
def test_windows_that_do_not_fit(runner, context, batch, message):
    with pytest.raises(ValueError, match=message):
        loss.check(runner, context, batch)


@pytest.mark.skipif(shutil.which("xz") is None, reason="no xz")
def test_xz_is_the_programs():
    piece = b"".join(b"line %d of the text\n" % (i * i) for i in range(900))
    packed = subprocess.run(["xz", "-9e", "-T1", "-c"], input=piece, capture_output=True, check=True).stdout
    assert loss.xz_bits_per_byte(piece) == 8 * len(packed) / len(piece)


def test_loops():
    novel = list(range(100, 140))
    assert not acceptance.in_loop(novel).any() and not acceptance.in_loop([]).any()
    assert not acceptance.in_loop([7] * 31 + novel).any()
    found = acceptance.in_loop(novel + [1, 2, 3] * 11 + novel)
    assert np.flatnonzero(found).tolist() == list(range(43, 73))
    assert acceptance.in_loop([5] * 32).sum() == 31


def test_tally_counts_steps_after_the_prefill():
    tally = acceptance.Tally()
    tally.add([[1], [2, 3], [4]])
    tally.add([[9], *[[9, 9]] * 20])
    assert (tally.tokens, tally.steps, tally.outside_tokens, tally.outside_steps) == (43, 22, 3, 2)
    assert tally.plus(tally).figures("_x")["acceptance_length_outside_loops_x"] == 1.5


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_equals_undrafted(runner, temperature):
    prompts = acceptance.passages(TEXT, [b"first\nsecond line\nthird one\n" * 9], 3, 12)
    assert [len(p) for p in prompts] == [13] * 3 and all(p[0] == TEXT.bos_id for p in prompts)
    done = []
    tally = acceptance.measure(runner, prompts, Sampling(6, temperature, 3), 2, done.append)
    assert tally.mismatches == 0 and done == [2, 1] and tally.steps > 0


@pytest.mark.parametrize("kind", ["loss", "acceptance"])
def test_the_whole_command(kind, runner, monkeypatch, capsys):
    held = [b"import os\nimport sys\n", b"def f(n):\n    return n\n", b"x = 1\ny = 2\n"]
    monkeypatch.setattr(evaluate, "pieces", lambda s: held)
    monkeypatch.setattr(evaluate, "build_runner", lambda s: (runner, TEXT))
    small = ("evaluate.context=32", "evaluate.stride=16", "evaluate.prompts=2", "evaluate.prompt_tokens=4")
    result = evaluate.run(configure(f"eval={kind}", *small))
    if kind == "loss":
        parts = [result[f"bits_per_byte_p{i}"] for i in range(3)]
        assert result["bits_per_byte"] == pytest.approx(sum(parts) / 3) and min(parts) > 5
        assert result["xz_bits_per_byte_p2"] == loss.xz_bits_per_byte(held[2])
    else:
        assert result["mismatches"] == 0 and result["prompts"] == 2
        assert {"acceptance_length", "acceptance_length_outside_loops", "acceptance_length_sampled"} <= set(result)
    assert "mean" in capsys.readouterr().out or kind == "acceptance"


def test_what_evaluate_refuses(tmp_path):
    with pytest.raises(ValueError, match="eval must be one of loss, acceptance, got 'speed'"):
        evaluate.run(configure("eval=speed"))
    with pytest.raises(ValueError, match=r"no .*heldout.json: training writes it"):
        evaluate.pieces(configure(f"checkpoint={tmp_path}"))
