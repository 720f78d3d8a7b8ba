"""bench=agree, bench=dispatch and bench=hosttable in small."""

from dataclasses import replace

import pytest

from scripts.benches import agree, dispatch, hosttable
from scripts.benches.sizes import AgreeSizes, DispatchSizes, EplbSizes, HostTableSizes
from tests.test_layout import CONF, build


def sized(**sizes):
    """The settings with other sizes of these benches."""
    s = build(CONF)
    return replace(s, benches=replace(s.benches, **sizes))


@pytest.mark.medium
def test_agree(tables):
    got = agree.run(sized(agree=AgreeSizes((2, 3), 0.1)))
    assert got["named"] and (got["rounds_n2"], got["rounds_n3"]) == (1, 3)
    for n in (2, 3):
        assert got[f"ratio_n{n}"] == pytest.approx(got[f"gloo_us_n{n}"] / got[f"recursive_us_n{n}"], rel=0.05)
        assert got[f"recursive_us_n{n}"] > 0 and got[f"recursive_skew_us_n{n}"] >= 0
    assert [row[:3] for row in tables["agree_faults"][1]] == [
        [2, "rank 1 is killed", "by all"],
        [3, "rank 2 is killed", "by all"],
    ]


@pytest.mark.slow
def test_dispatch(tables):
    got = dispatch.run(sized(dispatch=DispatchSizes((2,), 4)))
    assert got["bytes_ratio_n2_even"] > 1 and got["bytes_ratio_n2_one_busy"] > got["bytes_ratio_n2_even"]
    columns, rows = tables["dispatch"]
    assert [row[:2] for row in rows] == [[2, "even"], [2, "one_busy"]] and len(columns) == len(rows[0])


def test_hosttable(tables, monkeypatch):
    monkeypatch.setattr(hosttable, "TURNS", 3)
    got = hosttable.run(sized(hosttable=HostTableSizes(1 / 64)))
    assert got["ratio"] > 0 and got["ratio_shared"] > 0 and 0 <= got["huge_kb"] <= 16384
    assert got["fallback"] == "none" or "4 KB pages" in got["fallback"]
    columns, rows = tables["hosttable"]
    assert len(rows) == 3 and rows[0][-1] == "4 KB pages: asked not to" and len(columns) == len(rows[0])


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"benches\.agree\.ranks must each be 2 to 64, got \[1\]"):
        AgreeSizes((1,), 1.0)
    with pytest.raises(ValueError, match=r"benches\.agree\.seconds must be"):
        AgreeSizes((2,), -1.0)
    with pytest.raises(ValueError, match=r"benches\.dispatch\.rows must be >= 1"):
        DispatchSizes((2,), 0)
    with pytest.raises(ValueError, match=r"benches\.hosttable\.gb must be above 0"):
        HostTableSizes(0.0)
    with pytest.raises(ValueError, match=r"benches\.eplb\.redundant must each be a multiple of benches\.eplb\.ranks 4"):
        EplbSizes(None, 4, (6,))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+agree.ranks=[2]", "unknown key agree; known: "),  # a root key before there was `benches`
        ("+routing.trace=routing.npz", "unknown key routing.trace; known in routing: "),
        ("+benches.engine.turns=2", "unknown key benches.engine; known in benches: agree, dispatch, eplb, hosttable"),
        ("+benches.agree.rows=2", "unknown key benches.agree.rows; known in benches.agree: ranks, seconds"),
        ("benches.dispatch=null", "benches.dispatch must be a mapping of ranks, rows, got None"),
    ],
)
def test_keys_are_checked(override, message):
    with pytest.raises(ValueError, match=message):
        build(CONF, override)
