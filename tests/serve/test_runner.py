"""Compiled layers: the reference's tokens, a graph for each distinct piece, no recompile once warm, no copied pool."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from model.block import expert_half
from serve.offline import generate
from serve.request import Sampling
from serve.runner import Runner
from tests.small import FULL1, FULL2, REINDEX, REUSE, WINDOW, Seq, config, model, runner, step, tokens

POOL_BYTES = 64 * 2**20
SMALL = config((FULL2, REUSE), candidates=False, engram=(), stages=0)
MODELS = [
    pytest.param(SMALL, marks=pytest.mark.medium, id="small"),
    pytest.param(config((WINDOW, FULL2, REUSE, FULL1, REINDEX)), marks=pytest.mark.slow, id="every-mechanism"),
]


def run_some(r: Runner) -> list[list[int]]:
    """A run that changes lengths, batch membership, positions and page tables; the tokens it gives."""
    sampling = [Sampling(max_tokens=n, temperature=t) for n, t in ((6, 0.0), (1, 0.0), (9, 1.0), (3, 0.0))]
    prompts = [tokens(n, n) for n in (3, 40, 70, 1)]
    found = generate(r, prompts, sampling, speculate=bool(r.block))
    step(r, Seq(tokens(150), pages=(5, 2, 9)).span(0, 130))
    return [c.tokens for c in found]


@pytest.fixture(scope="module", params=MODELS)
def compiled(request) -> tuple[Runner, int]:
    """A warm runner over pages and rings of 64 MB each, and how many graphs it took."""
    torch._dynamo.reset()
    counters.clear()
    made = model(request.param, kernels="compile")
    layout = made.layout
    page, rings = layout.page_bytes(torch.float32), layout.slot_rings * layout.ring_row_bytes(torch.float32)
    r = Runner(made, -(-POOL_BYTES // page), slots=-(-POOL_BYTES // rings))
    return r, counters["stats"]["unique_graphs"]


def pieces(r: Runner) -> set[tuple]:
    """What the forward and the drafter ask to have compiled: functions with their static arguments."""
    asked: set[tuple] = set()

    def jit(fn: Callable, *static) -> Callable:
        asked.add((fn, *static))
        return partial(fn, *static)

    eager = runner(r.model.cfg)
    object.__setattr__(eager.model, "jit", jit)
    run_some(eager)
    return asked


def test_one_graph_for_each_distinct_piece(compiled):
    r, graphs = compiled
    asked = pieces(r)
    experts = sum(fn is expert_half for fn, *_ in asked)  # one graph for few rows, one for many
    tables = len(set(r.model.cfg.engram_num_embeddings)) > 1  # sizes are fixed in the first graph, free in a second
    assert graphs == len(asked) + experts + tables <= 19


def test_no_recompile_and_the_tokens_of_the_reference(compiled):
    r, graphs = compiled
    with torch.compiler.set_stance("fail_on_recompile"):
        got = run_some(r)
    assert got == run_some(runner(r.model.cfg))
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]


def largest_allocation(run: Callable[[], object]) -> int:
    """Bytes of the largest one, whether or not it is freed within its graph (an event's own memory is a net amount)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


def test_a_step_allocates_nothing_of_a_pool_s_size(compiled):
    r, _ = compiled
    spans = [Seq(tokens(80)).span(0, 70), Seq(tokens(5), 2, (1,)).span(0, 5)]
    assert largest_allocation(lambda: r.step(spans, torch.arange(8))) < POOL_BYTES / 16
    within = torch.compile(lambda pool: pool.index_put((torch.arange(2),), pool[2:4]).sum(0))
    for run in (r.cache.pages.clone, partial(within, r.cache.pages)):
        assert largest_allocation(run) >= POOL_BYTES, "a copy would be seen"


def test_compiled_logits_are_close(compiled):
    r, _ = compiled
    seq, other = Seq(tokens(80)), runner(r.model.cfg)
    for cut in ((0, 66), (66, 67), (67, 80)):
        got, want = (step(x, seq.span(*cut))[0] for x in (r, other))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert np.isfinite(got.numpy()).all()
