"""Placement of experts: the metric by hand, plans that are legal on any load, balance on later steps of streams."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.eplb import metric, policy
from parallel.eplb.policy import Slots
from parallel.eplb.window import Window, recent


def check(plan: np.ndarray, slots: Slots) -> None:
    """Every expert has 1 .. ranks replicas, and no rank has two of one expert."""
    assert plan.shape[1] == slots.total and plan.min() >= 0 and plan.max() < slots.experts
    count = metric.counts(plan, slots.experts)
    assert count.min() >= 1 and count.max() <= slots.replicas
    held = np.sort(plan.reshape(len(plan), slots.ranks, -1), -1)
    assert slots.ranks == 1 or (held[..., 1:] != held[..., :-1]).all()


def balance(load: np.ndarray, plan: np.ndarray, ranks: int) -> float:
    return metric.balancedness(metric.rank_loads(metric.slot_loads(load, plan), ranks))


def even(slots: Slots, layers: int) -> np.ndarray:
    return np.tile(np.arange(slots.experts), (layers, 1))


# --- metric ---


def test_failure_15_balancedness_reduces_over_ranks_not_layers():
    assert metric.balancedness(np.array([[100, 200], [100, 200]])) == 0.75
    assert metric.balancedness(np.array([[100, 100], [0, 0]])) == 1
    assert metric.balancedness(np.zeros((3, 4))) == 1
    t = np.array([[100, 200], [0, 0], [50, 50], [0, 40]])
    assert metric.balancedness(t) == pytest.approx((150 + 50 + 20) / (200 + 50 + 40))
    assert metric.per_layer(t) == pytest.approx({"min": 0.5, "p10": 0.55, "median": 0.75, "mean": 0.75})
    assert metric.per_layer(np.zeros((2, 2)))["mean"] == 1


def test_gap_recovered_in_three_forms():
    assert metric.recovered(0.35, 0.94) == pytest.approx({"linear": 0.908, "log": 0.941, "excess": 0.966}, abs=1e-3)
    assert metric.recovered(0.21, 0.89) == pytest.approx({"linear": 0.861, "log": 0.925, "excess": 0.967}, abs=1e-3)
    assert metric.recovered(1.0, 1.0)["excess"] == 1
    assert metric.recovered(0.8, 0.7)["linear"] < 0


def test_slot_loads_split_an_experts_load_over_its_replicas():
    plan = np.array([[0, 1, 0, 2]])
    assert metric.slot_loads(np.array([[10, 4, 6]]), plan).tolist() == [[5, 4, 5, 6]]
    assert metric.slot_loads(np.array([[[10, 4, 6]], [[2, 0, 0]]]), plan)[1].tolist() == [[1, 0, 1, 0]]


# --- plans ---


@st.composite
def cases(draw):
    ranks, each = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    total = ranks * each
    experts = draw(st.integers(each, total))  # at most a replica on each rank
    layers, rng = draw(st.integers(1, 4)), np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(("zipf", "uniform", "zero", "one", "ties", "huge")))
    load = {
        "zipf": rng.permuted(1e4 / np.arange(1, experts + 1) ** 1.2 * np.ones((layers, 1)), axis=1),
        "uniform": rng.poisson(50, (layers, experts)),
        "zero": np.zeros((layers, experts)),
        "one": np.eye(1, experts) * 1000 * np.ones((layers, 1)),
        "ties": np.full((layers, experts), 7),
        "huge": rng.random((layers, experts)) * 1e15,
    }[kind]
    return load, Slots(experts, ranks, total - experts), rng


@settings(max_examples=150, deadline=None)
@given(cases())
def test_plans_are_legal_and_repeatable(case):
    load, slots, rng = case
    new = policy.plan(load, slots)
    check(new, slots)
    assert (policy.plan(load, slots) == new).all()
    assert (policy.plan(load, slots, old=new) == new).all(), "nothing to move, and something moved"
    other = policy.plan(rng.permuted(load, axis=1), slots, old=new)
    check(other, slots)


def test_failure_19_replicas_of_an_expert_are_on_different_ranks():
    """Also where loads are equal and the last slots leave no choice but a swap."""
    for experts, ranks, redundant in ((8, 4, 8), (12, 4, 24), (16, 4, 48), (6, 3, 12), (384, 32, 64)):
        slots = Slots(experts, ranks, redundant)
        rng = np.random.default_rng(experts)
        for load in (np.ones((3, experts)), rng.zipf(1.5, (3, experts)).astype(float), np.zeros((3, experts))):
            check(policy.plan(load, slots), slots)


def test_settle_moves_little():
    rng = np.random.default_rng(1)
    slots = Slots(64, 8, 16)
    load = rng.zipf(1.5, (4, 64)).clip(max=500).astype(float)
    old = policy.plan(load, slots)
    new = policy.plan(load * rng.uniform(0.9, 1.1, load.shape), slots)
    settled = policy.settle(new.reshape(4, 8, -1), old, 64)
    assert (np.sort(settled.reshape(4, 8, -1)).sum((1, 2)) == np.sort(new.reshape(4, 8, -1)).sum((1, 2))).all()
    assert (settled != old).sum() < (new != old).sum()


def test_hierarchical_keeps_groups_within_a_node():
    rng = np.random.default_rng(2)
    slots = Slots(64, 8, 16, "hierarchical", groups=8, nodes=2)
    load = rng.zipf(1.6, (5, 64)).clip(max=300).astype(float)
    new = policy.plan(load, slots)
    check(new, slots)
    for layer in new.reshape(5, 2, -1) // 8:
        a, b = set(layer[0].tolist()), set(layer[1].tolist())
        assert len(a) == len(b) == 4 and not a & b
    assert (policy.plan(load, slots, old=new) == new).all()
    assert balance(load, new, 8) > 0.6
    one = Slots(64, 8, 16, "hierarchical", groups=1, nodes=1)
    assert (policy.plan(load, one) == policy.plan(load, Slots(64, 8, 16))).all()


def test_bad_shapes_and_loads_are_errors():
    for args, text in (
        ((6, 4), "divide"),
        ((4, 2, 6), "more than a replica"),
        ((8, 4, 0, "best"), "global or hierarchical"),
        ((8, 4, 0, "hierarchical", 3, 2), "hierarchical needs"),
        ((8, 4, -4), "redundant"),
    ):
        with pytest.raises(ValueError, match=text):
            Slots(*args)
    for bad in (np.ones(8), np.ones((2, 7)), np.full((2, 8), -1.0), np.full((2, 8), np.nan)):
        with pytest.raises(ValueError, match="eplb: loads"):
            policy.plan(bad, Slots(8, 4))


# --- streams: fitted on earlier steps, judged on later ones ---


def zipf(rng, layers, experts, power):
    p = 1 / np.arange(1, experts + 1) ** power
    return np.stack([rng.permutation(p / p.sum()) for _ in range(layers)])


def few_hot(rng, layers, experts, hot):
    p = np.full((layers, experts), 0.1 / experts)
    for row in p:
        row[rng.choice(experts, hot, replace=False)] += 0.9 / hot
    return p / p.sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("make", "experts", "redundant", "least"),
    [
        (lambda rng: zipf(rng, 6, 384, 0.7), 384, 32, 0.94),
        (lambda rng: zipf(rng, 6, 384, 1.2), 384, 32, 0.94),
        (lambda rng: zipf(rng, 3, 128, 1.0), 128, 32, 0.94),
        (lambda rng: few_hot(rng, 4, 384, 8), 384, 32, 0.9),
        (lambda rng: few_hot(rng, 4, 384, 3), 384, 64, 0.9),
        (lambda rng: zipf(rng, 4, 384, 0), 384, 32, 0.94),
    ],
    ids=("zipf 0.7", "zipf 1.2", "drafter", "8 hot", "3 hot", "uniform"),
)
def test_balance_on_later_steps(make, experts, redundant, least):
    rng = np.random.default_rng(5)
    p, slots = make(rng), Slots(experts, 32, redundant)
    draw = lambda: rng.multinomial(300_000, p)  # noqa: E731
    new = policy.plan(draw(), slots)
    check(new, slots)
    assert balance(draw(), new, 32) >= least


def test_a_drifting_stream_is_followed():
    rng = np.random.default_rng(6)
    slots, p = Slots(128, 16, 32), zipf(rng, 4, 128, 0.9)
    old = policy.plan(np.ones((4, 128)), slots)
    first = balance(rng.multinomial(200_000, p), old, 16)
    for _ in range(6):
        q = zipf(rng, 4, 128, 0.9)
        p = 0.9 * p + 0.1 * q
        load = rng.multinomial(200_000, p)
        new = policy.plan(load, slots, old=old)
        better = policy.worthwhile(load, old, new, 16, 0.02)
        old = np.where(better[:, None], new, old)
        check(old, slots)
    assert first < 0.6 < 0.9 < balance(rng.multinomial(200_000, 0.95 * p + 0.05 * q), old, 16)


def test_an_even_load_is_left_alone_and_noise_is_no_reason():
    rng = np.random.default_rng(7)
    slots, layers = Slots(384, 32, 32), 8
    old = policy.plan(np.ones((layers, 384)), slots)
    for tokens in (500, 5000, 500_000):
        load = rng.multinomial(tokens, np.full((layers, 384), 1 / 384))
        even_load = metric.slot_loads(load, old)
        assert even_load.sum() == pytest.approx(load.sum())
        # replicas of an even load make it uneven: that gain is real, what is left after it is noise
        old = policy.plan(np.ones((layers, 384)) * 100, slots, old=old)
    slots = Slots(384, 32)
    old = even(slots, layers)
    for tokens in (0, 500, 5000, 500_000):
        load = rng.multinomial(tokens, np.full((layers, 384), 1 / 384))
        assert not policy.worthwhile(load, old, policy.plan(load, slots, old=old), 32, 0.02).any()


def test_planning_a_full_model_is_fast():
    """The bench has the figure (100 ms); this only guards against another order of magnitude on a busy machine."""
    rng = np.random.default_rng(8)
    load, slots = rng.multinomial(300_000, zipf(rng, 40, 384, 0.8)), Slots(384, 32, 96)
    old = policy.plan(np.ones((40, 384)), slots)
    took = []
    for _ in range(3):
        begin = time.process_time()
        policy.plan(load, slots, old=old)
        took.append(time.process_time() - begin)
    assert min(took) < 0.3


def test_experts_busy_together_go_to_different_ranks():
    """Two sets of experts take turns: each plan is as even over all time, but rows tell how to be even at all times."""
    rng = np.random.default_rng(11)
    slots, on = Slots(32, 8), (np.arange(32) < 16)
    rows = np.stack([np.where(on == (i % 2 == 0), 100, 20) + rng.integers(0, 9, (3, 32)) for i in range(8)])
    told, blind = (policy.plan(rows.sum(0), slots, rows=r) for r in (rows, None))
    check(told, slots)
    at_worst = lambda plan: min(balance(row, plan, 8) for row in rows)  # noqa: E731
    assert at_worst(told) > 0.93 and at_worst(told) > at_worst(blind)


# --- window ---


def test_recent_forgets_what_moved_on_and_keeps_what_comes_and_goes():
    rng = np.random.default_rng(12)
    p, q = zipf(rng, 2, 64, 1.0), zipf(rng, 2, 64, 1.0)
    newest = [rng.multinomial(10_000, p) for _ in range(4)]
    moved = np.stack([*newest, *(rng.multinomial(10_000, q) for _ in range(4))])
    assert (recent(moved) == moved[:4].sum(0)).all()
    turns = np.stack([rng.multinomial(10_000, (p, q)[i % 2]) for i in range(8)])
    assert (recent(turns) == turns.sum(0)).all()
    assert (recent(np.zeros((8, 2, 64))) == 0).all()


def test_window_counts_experts_whatever_the_slots_hold():
    plan = np.array([[0, 1, 2, 0], [2, 1, 0, 0]])
    counters, window, rng = np.zeros((2, 4), np.int64), Window(2, 3, 8), np.random.default_rng(9)
    told = []
    for step in range(20):
        gained = rng.integers(0, 5, (2, 4))
        counters += gained
        truth = np.zeros((2, 3), np.int64)
        np.add.at(truth, (np.arange(2)[:, None], plan), gained)
        told.append(truth)
        assert window.step()  # a window of 8 steps has a grain of one
        window.see(counters, plan)
        if step % 2:
            plan = plan[:, ::-1].copy()
        rows = window.rows()
        assert not rows[0].any() and all((a == b).all() for a, b in zip(rows[1:], told[::-1]))
    with pytest.raises(ValueError, match="window_steps"):
        Window(1, 1, 0)
