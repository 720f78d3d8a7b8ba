"""Data-parallel engines that share their experts: n ranks give each request the tokens that one gives it."""

import asyncio
import select
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from parallel.agree import node
from parallel.agree.bell import Ringer
from serve.lockstep import WIDTH, Lockstep, bucket, ragged
from serve.request import Pause, Sampling
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
        pytest.param(4, {"speculate": True, "dispatch": "alltoall"}, marks=pytest.mark.slow),
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


def interrupted(ep: Any) -> list[list[int]]:
    """Tokens of this rank's ASKS, whose group pauses twice: once told by rank 0 alone, for a moment, once by all."""
    bench = Bench(ranks.share(CFG, ep, kernels="reference"), overlap=1, speculate=True)
    engine, steps = bench.engine, 0
    engine.lockstep = Lockstep(ranks.agree(), tick_s=0.001)
    handles = [bench.ask(*a) for a in ASKS[ep.rank :: ep.size]]

    def deliver(out: Any) -> None:
        bench.deliver(out)
        if all(a.finish for a in bench.answers.values()):
            engine.stop()

    async def pausing() -> None:
        nonlocal steps
        steps += 1
        if steps == 4 and ep.rank == 0:
            bench.mail.send(Pause())
            asyncio.get_running_loop().call_later(0.2, bench.mail.send, Pause(False))
        if steps == 40:
            bench.mail.send(Pause())
            asyncio.get_running_loop().call_later(0.2, bench.mail.send, Pause(False))
        await asyncio.sleep(0)

    bench.mail._deliver = deliver
    asyncio.run(engine.run(pausing))
    engine.scheduler.check()
    return [bench.answers[h].tokens for h in handles]


def test_a_group_that_pauses_goes_on_as_it_was():
    want = [Bench(small.model(CFG)).run(ask)[0] for ask in ASKS]
    for rank, tokens in enumerate(ranks.run(2, interrupted)):
        assert tokens == want[rank::2]


def rung(lockstep: Lockstep, wait_s: float) -> bool:
    return bool(select.select([lockstep.port.bell], [], [], wait_s)[0])


def test_failure_22_a_stale_ring_starts_nothing_and_a_call_is_not_lost():
    """Three ranks of a node: idle they exchange nothing; the one that gets work wakes the others; a ring of the past
    makes a rank look, no more."""
    board = node.create(3, WIDTH)
    idle = [Lockstep(node.Recursive(board.address, r, 3, WIDTH)) for r in (0, 1)]
    busy = node.Recursive(board.address, 2, 3, WIDTH)
    for lockstep in idle:
        short = lockstep.tick_s
        assert asyncio.run(lockstep.agree(None, False)) == (None, False, False)
        assert lockstep.port.step == 0 and lockstep.tick_s > 10 * short and not rung(lockstep, 0)
    Ringer().ring(idle[0].port._bell.address)
    assert rung(idle[0], 5) and asyncio.run(idle[0].agree(None, False)) == (None, False, False)
    assert not rung(idle[0], 0) and idle[0].port.step == 0
    with ThreadPoolExecutor(3) as threads:
        got = threads.submit(busy.gather, [7, 7, 0, 1, 0, 0])
        assert all(rung(lockstep, 5) for lockstep in idle)
        told = list(threads.map(lambda lockstep: asyncio.run(lockstep.agree(None, False)), idle))
        assert [(shape.rows, working, leaving) for shape, working, leaving in told] == [(7, True, False)] * 2
        assert got.result().tolist() == [[0] * WIDTH, [0] * WIDTH, [7, 7, 0, 1, 0, 0]]
    assert [lockstep.tick_s for lockstep in idle] == [short] * 2
