"""Routing traces: what is written comes back, what is broken is named, balancedness by hand."""

import numpy as np
import pytest

from scripts.evaluation import trace
from scripts.evaluation.trace import Routing, Trace, balancedness


def made(steps=(3, 0, 2), layers=2, k=2, experts=4, seed=0) -> Trace:
    rng, tokens = np.random.default_rng(seed), sum(steps)
    ids = rng.random((tokens, layers, experts)).argsort(-1)[..., :k].astype(np.int16)
    offsets = np.cumsum([0, *steps])
    return Trace(ids, offsets, np.zeros(tokens, np.int32), np.arange(tokens, dtype=np.int32), experts)


def arrays(path) -> dict:
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize("drafter", [None, made(steps=(4,), layers=1, experts=3)])
def test_a_trace_comes_back(drafter, tmp_path):
    want = Routing(np.array([5]), made(), drafter)
    trace.save(tmp_path / "routing.npz", want)
    got = trace.load(tmp_path / "routing.npz")
    assert got.prompts.tolist() == [5] and (got.drafter is None) == (drafter is None)
    for one, other in [(got.target, want.target)] + ([(got.drafter, drafter)] if drafter else []):
        assert one.experts == other.experts and one.steps == other.steps
        for name in ("ids", "offsets", "requests", "positions"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def test_counts_by_hand():
    t = made()
    want = np.zeros((3, 2, 4), int)
    for step in range(3):
        for row in t.ids[t.offsets[step] : t.offsets[step + 1]]:
            for layer in range(2):
                for expert in row[layer]:
                    want[step, layer, expert] += 1
    assert np.array_equal(t.step_counts(), want) and np.array_equal(t.counts(), want.sum(0))


BROKEN = [
    (lambda a: a.pop("prompts"), "no array 'prompts'"),
    (lambda a: a.pop("target_ids"), "no array 'target_ids'"),
    (lambda a: a.update(version=np.int64(9)), "version is 9, this reads 1"),
    (lambda a: a.update(target_ids=a["target_ids"].astype(np.int64)), "target_ids must be int16 of 3 dims"),
    (lambda a: a.update(target_ids=a["target_ids"] + np.int16(9)), r"target: ids must lie in 0..3"),
    (lambda a: a.update(target_ids=a["target_ids"] * np.int16(0)), "target: ids repeat an expert"),
    (lambda a: a.update(target_offsets=a["target_offsets"][::-1].copy()), "offsets must ascend from 0 to the 5 tokens"),
    (lambda a: a.update(target_requests=a["target_requests"] + np.int32(1)), r"requests must lie in 0..0"),
    (lambda a: a.update(target_positions=a["target_positions"][1:]), "have 5, 5, 4 tokens"),
    (lambda a: a.update(prompts=np.array([object()], object)), "no routing trace"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=[b[1] for b in BROKEN])
def test_what_is_broken_is_named(damage, message, tmp_path):
    path = tmp_path / "routing.npz"
    trace.save(path, Routing(np.array([5]), made()))
    held = arrays(path)
    damage(held)
    np.savez(path, **held)
    with pytest.raises(ValueError, match=f"{path}: .*{message}|{path}: {message}"):
        trace.load(path)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_trace(content, tmp_path):
    path = tmp_path / "routing.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no routing trace"):
        trace.load(path)
    with pytest.raises(ValueError, match="no routing trace"):
        trace.load(tmp_path / "gone.npz")


def test_balancedness():
    counts = np.array([[4, 0, 2, 2], [1, 1, 3, 3]])  # ranks of two experts: 4, 4 and 2, 6
    assert balancedness(counts, 2) == pytest.approx((4 + 4) / (4 + 6))
    assert balancedness(counts, 4) == pytest.approx((2 + 2) / (4 + 3))
    assert balancedness(counts, 1) == 1
    assert balancedness(np.stack((counts, np.zeros((2, 4), int))), 2) == pytest.approx((0.8 + 1) / 2)
    with pytest.raises(ValueError, match="3 ranks do not divide 4 experts"):
        balancedness(counts, 3)
