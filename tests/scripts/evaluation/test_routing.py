"""Routing statistics: the trace against the load counters."""

from dataclasses import replace

import numpy as np
import pytest

from kernels import choose
from kernels.registry import recording
from scripts.evaluation import given, routing, trace
from serve import offline
from serve.request import Sampling
from tests.scripts.evaluation.conftest import SIZES
from tests.scripts.test_generate import settings as configure


def test_the_trace_agrees_with_the_load_counters(g):
    """Each choice of every valid row, target and drafter, and nothing of padding."""
    prompts = given.passages(g, 3, 20)
    with recording(choose("reference").names()) as log:
        watched = routing.Watched(g.runner.model, 16, 5, "cpu", log)
        offline.generate(watched, prompts, [Sampling(5)] * 3, speculate=True)
    target, drafter = watched.target.close(), watched.drafter.close()
    load, layers = watched.cache.load.numpy(), g.runner.model.cfg.num_hidden_layers
    assert np.array_equal(target.counts(), load[:layers, : target.experts])
    assert np.array_equal(drafter.counts(), load[layers:, : drafter.experts])
    assert target.positions[: 3 * 20].tolist() == list(range(20)) * 3 and drafter.steps == target.steps - 1


def test_routing_writes_a_trace_that_loads(g, tmp_path):
    s = configure(
        *SIZES, "routing.prompts=5", "routing.prompt_tokens=12", "routing.max_tokens=3", "routing.ranks=[2,4]"
    )
    result = routing.run(replace(g, settings=s))
    got = trace.load(tmp_path / "routing.npz")
    assert got.prompts.tolist() == [12] * 5 and sorted(set(got.target.requests)) == list(range(5))
    assert result["tokens"] == len(got.target.ids) and result["drafter_steps"] == got.drafter.steps
    assert 1 / 4 <= result["balancedness_r4"] <= 1 and result["trace"] == str(tmp_path / "routing.npz")
    with pytest.raises(ValueError, match=r"routing\.ranks: 3 does not divide the model's 4 experts"):
        routing.run(replace(g, settings=configure("routing.ranks=[3]")))
