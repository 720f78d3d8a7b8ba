"""Evaluations: every byte counted once, loops found, the same text drafted and undrafted."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.pack import Span
from scripts import build, evaluate, laid, report
from scripts.bytetext import ByteText
from scripts.evaluation import acceptance, loss
from scripts.evaluation.given import check_room, pieces
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
    monkeypatch.setattr(laid, "CHUNK_TOKENS", 24)
    assert loss.bits_per_byte(runner, TEXT, piece, 64, 32, 4, lambda n: None) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("context", "batch", "message"),
    [(256, 5, "5 sequences at a time, serve.max_batch is 4"), (512, 4, "needs 32 pages"), (10**6, 1, "max_position")],
)
def test_windows_that_do_not_fit(runner, context, batch, message):
    with pytest.raises(ValueError, match=message):
        check_room(runner, context, batch, "evaluate.context")


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
    prompts = acceptance.openings(TEXT, [b"first\nsecond line\nthird one\n" * 9], 3, 12)
    assert [len(p) for p in prompts] == [13] * 3 and all(p[0] == TEXT.bos_id for p in prompts)
    done = []
    tally, verdicts = acceptance.measure(runner, prompts, Sampling(6, temperature, 3), 2, done.append)
    assert tally.mismatches == 0 and done == [2, 1] and tally.steps > 0
    assert len(verdicts) == tally.steps and all(0 <= v.kept <= len(v.drafts) == len(v.confidence) for v in verdicts)


HELD = [b"import os\nimport sys\n" * 12, b"def f(n):\n    return n\n" * 12, b"x = 1\ny = 2\n" * 12]
SMALL = (
    *(
        "evaluate.context=32",
        "evaluate.stride=16",
        "evaluate.prompts=2",
        "evaluate.prompt_tokens=4",
        "evaluate.bytes=40",
    ),
    *("needle.lengths=[90]", "needle.depths=[0.0]", "needle.samples=1", "needle.letters=3"),
    *("agreement.against=[self,decoder_replay]", "agreement.samples=1", "agreement.prompt=80", "agreement.tail=2"),
    *("agreement.hit=64", "routing.prompts=2", "routing.prompt_tokens=6", "routing.max_tokens=2"),
    *("routing.ranks=[2]", "serve.max_batch=4", "serve.pages=16"),
)


@pytest.fixture
def command(runner, monkeypatch, tmp_path):
    """`evaluate.run` in a run folder, on the small runner."""
    monkeypatch.setattr(evaluate, "pieces", lambda s: HELD)
    monkeypatch.setattr(evaluate, "build_runner", lambda s: (runner, TEXT))
    monkeypatch.setattr(report, "run_folder", lambda: tmp_path)
    return lambda *overrides: evaluate.run(configure(*SMALL, *overrides))


def test_loss(command, tmp_path, capsys):
    result = command("eval=loss")
    parts = [result[f"bits_per_byte_p{i}"] for i in range(3)]
    assert result["bits_per_byte"] == pytest.approx(sum(parts) / 3) and min(parts) > 5
    assert result["xz_bits_per_byte_p2"] == loss.xz_bits_per_byte(HELD[2])
    assert "mean" in capsys.readouterr().out and (tmp_path / "loss.csv").is_file()


def test_everything_is_one_flat_result(command, tmp_path):
    result = command("eval=all")
    wanted = ("loss_bits_per_byte", "needle_needle_gain_90", "agreement_kl_decoder_replay", "acceptance_ece")
    assert {*wanted, "routing_balancedness_r2", "mismatches"} <= set(result)
    assert result["mismatches"] == result["acceptance_mismatches"] == 0
    assert result["agreement_kl_self"] == 0 and result["agreement_top1_self"] == 1
    assert all(isinstance(v, (int, float, str, type(None))) for v in result.values())
    assert {p.stem for p in tmp_path.glob("*.png")} == {"needle", "acceptance", "routing"}
    tables = {"loss", "needle", "agreement", "acceptance", "positions", "reliability", "balancedness", "routing"}
    assert {p.stem for p in tmp_path.glob("*.csv")} == tables
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_what_evaluate_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"eval must be one of loss, needle, agreement, .*, all, got 'speed'"):
        evaluate.run(configure("eval=speed"))
    with pytest.raises(ValueError, match=r"no .*heldout.json: training writes it"):
        pieces(configure(f"checkpoint={tmp_path}"))


BAD = [
    ("evaluate.bytes=0", "evaluate.bytes must be >= 1 or null"),
    ("needle.depths=[2.0]", "needle.depths must lie in 0..1, got 2.0"),
    ("needle.lengths=[]", "must not be empty"),
    ("agreement.hit=768", "agreement.hit must be < agreement.prompt 768"),
    ("agreement.against=[]", "agreement.against is empty"),
    ("routing.ranks=[0]", "routing.ranks must be >= 1"),
    ("routing.prompts=0", "routing.prompts must be >= 1"),
]


@pytest.mark.parametrize(("override", "message"), BAD, ids=[b[0] for b in BAD])
def test_sizes_that_cannot_be(override, message):
    with pytest.raises(ValueError, match=message):
        configure(override)
