"""bench=agree, bench=dispatch and bench=hosttable in small."""

from dataclasses import replace

import pytest

from scripts import report
from scripts.benches import agree, dispatch, hosttable
from scripts.benches.sizes import Agree, Dispatch, HostTable
from tests.test_layout import CONF, build


@pytest.fixture
def tables(monkeypatch):
    seen = {}
    monkeypatch.setattr(report, "table", lambda name, columns, rows: seen.update({name: (columns, rows)}))
    return seen


@pytest.mark.medium
def test_agree(tables):
    got = agree.run(replace(build(CONF), agree=Agree((2, 3), 0.1)))
    assert got["named"] and (got["rounds_n2"], got["rounds_n3"]) == (1, 3)
    for n in (2, 3):
        assert got[f"ratio_n{n}"] == pytest.approx(got[f"gloo_us_n{n}"] / got[f"recursive_us_n{n}"], rel=0.05)
        assert got[f"recursive_us_n{n}"] > 0 and got[f"recursive_skew_us_n{n}"] >= 0
    assert [row[:3] for row in tables["agree_faults"][1]] == [
        [2, "rank 1 is killed", "by all"],
        [3, "rank 2 is killed", "by all"],
    ]


@pytest.mark.medium
def test_dispatch(tables):
    got = dispatch.run(replace(build(CONF), dispatch=Dispatch((2,), 4)))
    assert got["bytes_ratio_n2_even"] > 1 and got["bytes_ratio_n2_one_busy"] > got["bytes_ratio_n2_even"]
    columns, rows = tables["dispatch"]
    assert [row[:2] for row in rows] == [[2, "even"], [2, "one_busy"]] and len(columns) == len(rows[0])


def test_hosttable(tables, monkeypatch):
    monkeypatch.setattr(hosttable, "TURNS", 3)
    got = hosttable.run(replace(build(CONF), hosttable=HostTable(1 / 64)))
    assert got["ratio"] > 0 and got["ratio_shared"] > 0 and 0 <= got["huge_kb"] <= 16384
    assert got["fallback"] == "none" or "4 KB pages" in got["fallback"]
    columns, rows = tables["hosttable"]
    assert len(rows) == 3 and rows[0][-1] == "4 KB pages: asked not to" and len(columns) == len(rows[0])


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"agree\.ranks must each be 2 to 64, got \[1\]"):
        Agree((1,), 1.0)
    with pytest.raises(ValueError, match=r"agree\.seconds must be"):
        Agree((2,), -1.0)
    with pytest.raises(ValueError, match=r"dispatch\.rows must be >= 1"):
        Dispatch((2,), 0)
    with pytest.raises(ValueError, match=r"hosttable\.gb must be above 0"):
        HostTable(0.0)
