"""Made workloads: the formats can be read back, figures hold, and the sessions look like a recording not fitted to."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from serve.load.records import expand, hits, subagents, turns
from serve.load.synthetic import (
    SessionShape,
    arrivals,
    flat,
    lengths,
    sessions,
    sharing,
)
from serve.load.traces import read_azure, read_mooncake, read_weka
from tests.serve.load.writers import write_azure, write_mooncake, write_weka

TRACES = Path(__file__).parents[4] / "shared" / "traces"  # beside the repository, not in it
SMALL = SessionShape(turns=(8, 0.5), subagents=0.7)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_arrivals(shape):
    gaps = np.diff(arrivals(rng(), 20_000, 5.0, shape), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)
    with pytest.raises(ValueError, match="rate 0"):
        arrivals(rng(), 3, 0)


def test_lengths():
    drawn = lengths(rng(), 20_000, 1000, 1.0, 5000)
    assert np.median(drawn) == pytest.approx(1000, rel=0.05) and drawn.min() >= 1 and drawn.max() == 5000


@pytest.mark.parametrize("runs", [True, False])
def test_sessions_can_be_written_and_read(runs, tmp_path):
    made = sessions(rng(), 6, SMALL)
    write_weka(tmp_path / "w.jsonl", made, runs)
    back = read_weka(tmp_path / "w.jsonl")
    assert any(list(subagents(s.events)) for s in made)
    for a, b in zip(made, back, strict=True):
        assert (a.name, a.head_tokens, a.duration_s) == (b.name, b.head_tokens, b.duration_s)
        for x, y in zip(turns(a.events), turns(b.events), strict=True):
            assert (x.start_s, x.input_tokens, x.output_tokens) == (y.start_s, y.input_tokens, y.output_tokens)
            assert (x.call_s, x.think_s, x.ids.tolist()) == (y.call_s, y.think_s, y.ids.tolist())


def test_hits_of_small_traces_counted_by_hand(tmp_path):
    write_weka(tmp_path / "w.jsonl", sessions(rng(), 6, SMALL))
    for s in read_weka(tmp_path / "w.jsonl"):
        seen, found, total = set(), 0, 0
        for t in turns(s.events):
            ids = [i for start, n in t.runs.tolist() for i in range(start, start + n)]
            found += next((k for k, i in enumerate(ids) if i not in seen), len(ids))
            total += len(ids)
            seen.update(ids)
        assert hits(turns(s.events)) == (found, total) and 0 < found < total


def test_flat_traces_can_be_written_and_read(tmp_path):
    moon, azure = sharing(rng(), 50, 3.0, 4), flat(rng(), 50, 3.0, 1.0, (100, 1.0, 900), (20, 1.0, 90))
    write_mooncake(tmp_path / "m.jsonl", moon)
    write_azure(tmp_path / "a.csv", azure)
    back = read_mooncake(tmp_path / "m.jsonl")
    assert [expand(a.runs).tolist() for a in back] == [expand(a.runs).tolist() for a in moon]
    assert [(a.at_s, a.input_tokens) for a in back] == [(a.at_s, a.input_tokens) for a in moon]
    assert 0 < hits(back)[0] < hits(back)[1]
    again = read_azure(tmp_path / "a.csv")
    assert [(a.input_tokens, a.output_tokens) for a in again] == [(a.input_tokens, a.output_tokens) for a in azure]
    assert np.allclose([a.at_s for a in again], [a.at_s - azure[0].at_s for a in azure], atol=2e-6)


def quantities(made):
    every = [list(turns(s.events)) for s in made]
    return {
        "turns": [len(t) for t in every],
        "input": [t.input_tokens for s in every for t in s],
        "output": [t.output_tokens for s in every for t in s],
        "growth": [b.input_tokens - a.input_tokens for s in every for a, b in itertools.pairwise(s)],
        "think": [t.think_s for s in every for t in s[1:] if t.think_s is not None],
    }


def rate(made):
    found, total = np.array([hits(turns(s.events)) for s in made]).sum(axis=0)
    return found / total


def distance(a, b):
    """Kolmogorov-Smirnov."""
    a, b = np.sort(a), np.sort(b)
    both = np.concatenate([a, b])
    return np.abs(np.searchsorted(a, both, "right") / len(a) - np.searchsorted(b, both, "right") / len(b)).max()


@pytest.mark.skipif(not TRACES.is_dir(), reason="the trace slices are not beside the repository")
def test_sessions_look_like_recorded_ones():
    """As close to the 100 sessions left out of the fit as the 200 fitted ones are, within 0.05; hit rate of the fit
    within half a point."""
    recorded, mine = read_weka(TRACES / "agentic_weka" / "agentic_weka_dev.jsonl"), sessions(rng(), 200)
    fitted, held, made = quantities(recorded[:200]), quantities(recorded[200:]), quantities(mine)
    for name in held:
        assert distance(made[name], held[name]) <= distance(fitted[name], held[name]) + 0.05, name
        assert distance(made[name], fitted[name]) <= 0.15, name
    assert rate(mine) == pytest.approx(rate(recorded[:200]), abs=0.005)
