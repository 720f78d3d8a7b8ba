"""Data-parallel engines that share their experts: n ranks give each request the tokens that one gives it."""

import asyncio
from typing import Any

import pytest

from serve.lockstep import Lockstep, bucket, ragged
from serve.request import Sampling
from tests import ranks, small
from tests.serve.harness import Bench

CFG = small.config(n_routed_experts=8, dspark_n_routed_experts=8)
LENGTHS = (1, 70, 30, 64, 9, 130, 5)
ASKS = [(small.tokens(n, seed=n), Sampling(14, (i % 2) * 0.9, seed=i)) for i, n in enumerate(LENGTHS)]


def serve(ep: Any, kernels: str, how: dict) -> tuple[list[list[int]], dict]:
    """This rank's share of ASKS, an uneven one: with 4 ranks the last has none."""
    dispatch = how.pop("dispatch", "allgather")
    bench = Bench(ranks.share(CFG, ep, kernels=kernels, dispatch=dispatch), **how)
    engine = bench.engine
    engine.lockstep = Lockstep(ranks.agree(), tick_s=0.001, size=ragged if dispatch == "alltoall" else bucket)
    mine = [a for i, a in enumerate(ASKS) if (i * i) % ep.size == ep.rank]
    handles = [bench.ask(*a) for a in mine]
    if how.get("abort") and handles:
        bench.abort(handles[0])

    def deliver(out: Any) -> None:
        bench.deliver(out)
        if all(a.finish for a in bench.answers.values()):
            engine.stop()

    bench.mail._deliver = deliver
    if not handles:
        engine.stop()
    asyncio.run(engine.run(lambda: asyncio.sleep(0)))
    engine.scheduler.check()
    assert engine.scheduler.pages.used == 0
    return [bench.answers[h].tokens for h in handles], engine.stats()


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (2, {"speculate": True, "long_prefill_tokens": 20, "overlap": 1}),
        (2, {"speculate": True, "long_prefill_tokens": 20, "overlap": 1, "dispatch": "alltoall"}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(4, {"speculate": True, "window": "halo"}, marks=pytest.mark.slow),
        pytest.param(4, {"speculate": True, "dispatch": "alltoall"}, marks=pytest.mark.medium),
        pytest.param(8, {"speculate": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_give_the_tokens_of_one(size, how):
    one = small.model(CFG)
    want = [Bench(one).run(ask)[0] for ask in ASKS]
    got = ranks.run(size, serve, "reference", how)
    for rank, (tokens, _) in enumerate(got):
        assert tokens == [w for i, w in enumerate(want) if (i * i) % size == rank]


@pytest.mark.parametrize("dispatch", ["allgather", pytest.param("alltoall", marks=pytest.mark.medium)])
def test_trimmed_prefill_in_lockstep(dispatch):
    how = {"speculate": True, "prefill": "layer20_replay", "long_prefill_tokens": 40}
    want = [Bench(small.model(CFG), prefill="layer20_replay").run(ask)[0] for ask in ASKS]
    for rank, (tokens, _) in enumerate(ranks.run(2, serve, "reference", {**how, "dispatch": dispatch})):
        assert tokens == [w for i, w in enumerate(want) if (i * i) % 2 == rank]
