"""Plans as data: first match wins, and every mistake is an error with its path."""

import itertools

import pytest

from parallel import plan
from parallel.plan import Plan

SHAPES = {
    "embed": (128, 64),
    "layers.0.block.ffn.experts.w1": (16, 32, 64),
    "layers.0.block.ffn.gate.weight": (16, 64),
    "layers.1.block.ffn.experts.w1": (16, 32, 64),
    "layers.1.engram.embed": (251, 32),
}
EXPERTS = ["layers.*.block.ffn.experts.*", {"shard": 0, "axis": "ep"}]
TABLES = ["layers.*.engram.embed", {"shard": 0, "axis": "ep", "uneven": "ceil", "optional": True}]
REST = ["*", "replicate"]


def dep(n: int) -> Plan:
    return plan.parse({"dp": n, "ep": n}, [EXPERTS, TABLES, REST])


def test_slices_tile_every_sharded_dim():
    p = dep(8)
    p.check(SHAPES)
    for path in SHAPES:
        cuts = [p.slice(path, SHAPES[path], p.coords(r)) for r in range(p.world)]
        if "experts" in path or "engram" in path:
            assert [c[0] for c in cuts] == [0] * 8
            assert cuts[0][1] == 0 and cuts[-1][2] == SHAPES[path][0]
            assert all(a[2] == b[1] for a, b in itertools.pairwise(cuts))
        else:
            assert cuts == [None] * 8


def test_uneven_rows_are_ceil_and_the_last_ranks_take_what_is_left():
    p = plan.parse({"ep": 4}, [["t", {"shard": 0, "axis": "ep", "uneven": "ceil"}]])
    assert [p.slice("t", (5, 2), p.coords(r))[1:] for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_axis_of_size_one_replicates():
    p = dep(1)
    p.check(SHAPES)
    assert all(p.slice(path, shape, p.coords(0)) is None for path, shape in SHAPES.items())


def test_first_match_wins():
    p = plan.parse({"ep": 2}, [["a.b", "replicate"], ["a.*", {"shard": 0, "axis": "ep"}]])
    assert p.slice("a.b", (4,), p.coords(1)) is None
    assert p.slice("a.c", (4,), p.coords(1)) == (0, 2, 4)


def test_axes_lie_over_the_same_ranks():
    p = plan.parse({"dp": 8, "ep": 4}, [REST])
    assert p.world == 8 and p.coords(6) == {"dp": 6, "ep": 2}


@pytest.mark.parametrize("place", ["shard", "replicate", "host"])
def test_place_picks_one(place):
    p = plan.parse({"ep": 4}, [["t", {"place": place, "shard": 0, "axis": "ep", "uneven": "ceil"}]])
    assert p.slice("t", (5, 2), p.coords(1)) == ((0, 2, 4) if place == "shard" else None)
    assert p.rule("t").host == (place == "host")
    assert plan.parse({"ep": 4}, [["t", "host"]]).rule("t") == plan.parse({}, [["t", {"place": "host"}]]).rule("t")


def test_leaf_that_no_rule_matches():
    p = plan.parse({"ep": 2}, [EXPERTS])
    with pytest.raises(ValueError, match="no rule matches parameter 'embed'"):
        p.check(SHAPES)


def test_rule_that_matches_no_leaf():
    shapes = {k: v for k, v in SHAPES.items() if "experts" not in k and "engram" not in k}
    with pytest.raises(ValueError, match=r"'layers\.\*\.block\.ffn\.experts\.\*' matches no parameter"):
        dep(2).check(shapes)  # the Engram rule is optional, the one for experts is not


def test_rule_hidden_behind_an_earlier_one():
    with pytest.raises(ValueError, match="'embed' matches no parameter"):
        plan.parse({"ep": 1}, [REST, ["embed", "replicate"]]).check(SHAPES)


def test_size_that_does_not_divide():
    with pytest.raises(ValueError, match=r"dim 0 of 'layers.0.block.ffn.experts.w1' has 16 entries.* of size 3"):
        dep(3).check(SHAPES)


def test_dim_that_is_not_there():
    p = plan.parse({"ep": 2}, [["embed", {"shard": 2, "axis": "ep"}], REST])
    with pytest.raises(ValueError, match=r"shards dim 2 of 'embed', whose shape is \(128, 64\)"):
        p.check(SHAPES)


@pytest.mark.parametrize(
    ("axes", "rules", "message"),
    [
        ({"dp": 0}, [REST], r"axes\.dp must be an integer >= 1, got 0"),
        ({"dp": 8, "ep": 3}, [REST], r"axes\.ep must divide the largest axis 8, got 3"),
        ({"dp": 2}, [EXPERTS, REST], r"names axis 'ep'; axes: \['dp'\]"),
        ({"dp": 2}, ["replicate"], r"a rule is \[path glob, placement\], got 'replicate'"),
        ({"dp": 2}, [["*", "everywhere"]], "a placement is 'replicate', 'host' or a mapping, got 'everywhere'"),
        ({"dp": 2}, [["*", {"place": "disk"}]], "place must be one of shard, replicate, host, got 'disk'"),
        ({"dp": 2}, [["*", {"shard": 0, "axes": "dp"}]], r"unknown keys \['axes'\]; known"),
        ({"dp": 2}, [["*", {"axis": "dp"}]], "needs 'shard: <dim>' and 'axis: <name>'"),
        ({"dp": 2}, [["*", {"shard": 0, "axis": "dp", "uneven": "floor"}]], "uneven must be 'ceil', got 'floor'"),
        ({"dp": 2}, [["*", {"shard": 0, "axis": "dp", "optional": 1}]], "optional must be true or false, got 1"),
    ],
)
def test_bad_values(axes, rules, message):
    with pytest.raises(ValueError, match=message):
        plan.parse(axes, rules)


def test_rank_outside_the_plan():
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.3 under this plan, got 4"):
        dep(4).coords(4)


def test_hashable():
    assert hash(dep(2)) == hash(dep(2)) and dep(2) != dep(4)


@pytest.mark.parametrize(
    ("axes", "rules", "message"),
    [
        (None, [["*", "replicate"]], "parallel.axes must be a mapping"),
        ({"dp": 1}, None, "parallel.rules must be a list"),
        ({"dp": 1}, "replicate", "parallel.rules must be a list"),
        ({"dp": 1}, [3], "a rule is .path glob, placement., got 3"),
    ],
)
def test_values_of_another_kind(axes, rules, message):
    with pytest.raises(ValueError, match=message):
        plan.parse(axes, rules)
