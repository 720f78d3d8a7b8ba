"""Acceptance by position and calibration, against numbers made by hand."""

import math

import pytest

from scripts import report
from scripts.evaluation import calibration
from serve.offline import Verdict


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def verdict(kept: int, *chances: float) -> Verdict:
    return Verdict(0, list(range(len(chances))), [logit(p) for p in chances], kept)


def test_a_block_counts_up_to_its_first_miss():
    position, confidence, kept = calibration.judged([verdict(1, 0.9, 0.8, 0.7), verdict(2, 0.6, 0.5), verdict(0, 0.2)])
    assert position.tolist() == [0, 1, 0, 1, 0]
    assert confidence.tolist() == pytest.approx([0.9, 0.8, 0.6, 0.5, 0.2])
    assert kept.tolist() == [True, False, True, True, False]


def test_ece_of_two_bins():
    """0.9, 0.92: one kept of two; 0.31, 0.35, 0.33: none of three. ECE = (2 * 0.41 + 3 * 0.33) / 5."""
    blocks = [verdict(1, 0.9), verdict(0, 0.92), verdict(0, 0.31), verdict(0, 0.35), verdict(0, 0.33)]
    table = calibration.reliability(*calibration.judged(blocks)[1:])
    assert [(round(a, 6), round(b, 6), n) for a, b, n, *_ in table] == [(0.3, 0.4, 3), (0.9, 1.0, 2)]
    assert [row[4] for row in table] == [0.0, 0.5]
    assert calibration.ece(table) == pytest.approx((2 * 0.41 + 3 * 0.33) / 5)


def test_a_calibrated_drafter_has_no_error():
    blocks = [verdict(1, 0.75)] * 3 + [verdict(0, 0.75)]
    assert calibration.ece(calibration.reliability(*calibration.judged(blocks)[1:])) == pytest.approx(0)
    assert calibration.ece([]) is None


def test_positions():
    blocks = [verdict(3, 0.5, 0.5, 0.5), verdict(1, 0.5, 0.5, 0.5), verdict(1, 0.5, 0.5), verdict(0, 0.5)]
    assert calibration.positions(blocks, 3) == [
        (1, 4, 3 / 4, 3 / 4),
        (2, 3, 1 / 3, 1 / 3),
        (3, 2, 1 / 2, 1.0),
    ]
    assert calibration.positions([], 1) == [(1, 0, None, None)]


def test_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "run_folder", lambda: tmp_path)
    figures = calibration.judge([verdict(1, 0.9, 0.5), verdict(0, 0.5, 0.5)], 2)
    assert figures["kept_p1"] == 0.5 and figures["kept_if_reached_p2"] == 0.0
    assert figures["brier"] == pytest.approx((0.01 + 0.25 + 0.25) / 3)
    assert figures["drafts_judged"] == 3 and figures["kept"] == pytest.approx(1 / 3)
    assert (tmp_path / "acceptance.png").is_file()


def test_no_drafts_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "run_folder", lambda: tmp_path)
    assert calibration.judge([], 2)["ece"] is None
