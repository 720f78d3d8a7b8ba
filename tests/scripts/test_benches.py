"""Benches of host work in their smallest form: what they measure is what they say, and every key is there."""

import numpy as np
import pytest

from scripts.benches import admission, scheduler
from serve.schedule.pages import chain


def test_scheduler_bench_gives_its_keys(tables):
    got = scheduler.run(None, batch=8, long=5000, steps=4, turns=2)
    for key in ("step_us_8", "step_us_8_855k", "step_us_8_drafts"):
        assert 0 < got[key] <= got[f"{key}_p99"]
    columns, rows = tables["scheduler"]
    assert [row[0] for row in rows] == ["8, prompts of 1k", "8, prompts of 855k", "8, prompts of 1k, 4 drafts"]
    assert [round(row[1], 1) for row in rows] == [got[f"step_us_8{kind}"] for kind in ("", "_855k", "_drafts")]
    assert len(columns) == len(rows[0])


def test_a_side_decodes_and_crosses_pages_a_few_at_a_time():
    side = scheduler.side("", "", 64, 1000, 0, 256)
    s = side.scheduler
    assert len(s.running) == 64 and not s.waiting
    assert s.counts["hit_tokens"] > 63 * 800, "they share the prompt"
    taken = []
    for _ in range(192):
        free = s.pages.free
        side.step()
        taken.append(free - s.pages.free)
    s.check()
    assert np.mean(taken[128:]) == 1.0 and max(taken[128:]) <= 2, "64 sequences, pages of 64: one page a step"
    assert s.pages._blanks == 0, "every page taken was a cached one"


def test_admission_bench_gives_its_keys(tables):
    got = admission.run(None, tokens=3000, turns=2)
    assert {"admit_ms_855k_cold", "admit_ms_855k_hit", "baseline_ms", "ratio", "hash_ms_855k"} <= set(got)
    columns, rows = tables["admission"]
    assert columns[0] == "3,000 tokens" and [row[0] for row in rows] == ["cold", "hit", "front end: hashing"]


@pytest.mark.parametrize("tokens", (256, 257, 1000))
def test_the_baseline_does_the_same_work(tokens):
    """The same names, and the same pages found."""
    lists = admission.Lists(10, 256)
    ids = list(range(tokens))
    names = chain(np.array(ids, np.int32), 256)
    first = lists.admit(ids)
    assert len(first) == -(-tokens // 256) and len(lists.free) == 10 - len(first)
    lists.publish(first, names)
    lists.leave(first)
    again = lists.admit(ids)
    assert [b.number for b in again[: (tokens - 1) // 256]] == [b.number for b in first[: (tokens - 1) // 256]]
    assert set(lists.cached) <= set(names) and len(lists.free) == 10 - len(again)
