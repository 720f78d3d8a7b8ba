"""Live migration: ranks that decode while experts move draw the tokens of one rank that never moved any."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model import moe
from parallel import expert, migrate
from parallel.eplb import metric, policy
from parallel.eplb.policy import Slots
from parallel.eplb.settings import Eplb
from parallel.local import Fabric, LocalLink
from parallel.mesh import Axis, Seat
from parallel.migrate import Experts, Rebalancer, Rebalancing, checksum, shown, staging
from parallel.movers import LinkMover, moves
from parallel.plan import parse
from parallel.port import LinkError
from scripts.rebalancing import build_rider
from scripts.serving.engine import row_width
from serve.lockstep import WIDTH, Lockstep, bucket, ragged
from serve.request import Sampling
from tests import ranks, small
from tests.serve.harness import Bench

CFG = small.config(n_routed_experts=8)
ASKS = [(small.tokens(n, seed=n), Sampling(30, (i % 2) * 0.9, seed=i)) for i, n in enumerate((1, 40, 9, 64, 20, 5))]
OFTEN = Eplb(True, interval_steps=3, window_steps=8, redundant=4, min_gain=0.0, timeout_s=30, transport="gloo")


def shuffled(slots: Slots) -> Any:
    """A planner that moves nearly everything in every round, legally."""
    rng = np.random.default_rng(0)
    return lambda load, *_: policy.plan(rng.random(load.shape) ** 4, slots)


def serve(ep: Any, how: Eplb, more: dict) -> dict:
    """This rank's share of ASKS, with rounds as often as they fit."""
    dispatch = more.pop("dispatch", "allgather")
    bench = Bench(ranks.share(CFG, ep, redundant=how.spare, dispatch=dispatch), **more)
    engine, runner = bench.engine, bench.engine.device.runner
    rider = build_rider(runner.model, runner.cache, how, Seat(ep.rank, ep.size), shuffled)
    size = ragged if dispatch == "alltoall" else bucket
    engine.lockstep = Lockstep(ranks.agree(rider.width), tick_s=0.001, rider=rider, size=size)
    mine = [a for i, a in enumerate(ASKS) if i % ep.size == ep.rank]
    handles = [bench.ask(*a) for a in mine]

    async def pause() -> None:
        if all(a.finish for a in bench.answers.values()):
            engine.stop()

    asyncio.run(engine.run(pause))
    parts = rider.parts.values()
    return {
        "tokens": [bench.answers[h].tokens for h in handles],
        "plans": [p.plan for p in parts],
        "counts": [p.counts for p in parts],
        "held": [held(p) for p in parts],
        "stats": engine.stats(),
    }


def held(part: Any) -> np.ndarray:
    """Checksums [L, S] of what is in this rank's slots, and whether the model's placement says so of the plan."""
    for layer, place in enumerate(part.held.places):
        slots = part.held.slots
        want = expert.placement(torch.from_numpy(part.plan[layer]), slots.experts, slots.replicas)
        assert torch.equal(place.replicas, want.replicas) and torch.equal(place.counts, want.counts)
    return np.array([[checksum([t[s] for t in rows]) for s in range(len(rows[0]))] for rows in part.rows])


def check(got: list[dict]) -> None:
    """Tokens of one rank; each slot on each rank holds the expert that all ranks' plans say."""
    one = small.model(CFG)
    for rank, result in enumerate(got):
        assert result["tokens"] == [Bench(one).run(a)[0] for i, a in enumerate(ASKS) if i % len(got) == rank]
        assert all((a == b).all() for a, b in zip(result["plans"], got[0]["plans"], strict=True))
    params = [*one.params.layers, *one.params.mtp]
    truth = [[checksum(parts) for parts in zip(*(as_rows(t) for t in moe.held(p.block.ffn)))] for p in params]
    plans = [row for plan in got[0]["plans"] for row in plan]
    there = [np.concatenate([r["held"][part][layer] for r in got])
             for part, plan in enumerate(got[0]["plans"]) for layer in range(len(plan))]  # fmt: skip
    for plan, sums, want in zip(plans, there, truth, strict=True):
        assert sums.tolist() == [want[e] for e in plan]


def as_rows(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8).view(t.shape[0], -1)


@pytest.mark.parametrize(
    ("size", "transport", "more"),
    [
        pytest.param(2, "nixl", {"speculate": True, "overlap": 1}, id="2 nixl", marks=pytest.mark.medium),
        pytest.param(2, "gloo", {"speculate": True, "dispatch": "alltoall"}, id="2 alltoall", marks=pytest.mark.slow),
        pytest.param(4, "gloo", {"speculate": True}, id="4 gloo", marks=pytest.mark.slow),
    ],
)
def test_failure_17_tokens_stay_the_same_while_experts_move(size, transport, more):
    got = ranks.run(size, serve, Eplb(**{**vars(OFTEN), "transport": transport}), more)
    check(got)
    for result in got:
        for counts in result["counts"]:
            assert counts.rounds > 0 and counts.layers > 0 and not counts.abandoned, counts
        assert result["stats"]["eplb_target_layers_total"] > 0
    assert sum(c.checked for r in got for c in r["counts"]) > 0


# --- ranks of one process: what is in the slots is looked at after every step ---


class Ranks:
    """n ranks with L layers of E experts, a weight and a scale each, over the in-process twin of NIXL."""

    def __init__(self, n: int = 3, layers: int = 4, experts: int = 9, how: Eplb = OFTEN):
        self.rng, slots = np.random.default_rng(0), Slots(experts, n, how.spare)
        self.weights = torch.randn(layers, experts, 5, 7)
        self.scales = torch.randint(0, 255, (layers, experts, 3), dtype=torch.uint8)
        self.popular = 1 / np.arange(1, experts + 1) ** 1.5
        plan = expert.first_plan(experts, how.spare, n).view(n, -1)
        fabric = Fabric(time.monotonic)
        links = [LocalLink(fabric, str(r)) for r in range(n)]
        names = [link.name for link in links]
        for link in links:
            for other in links:
                link is other or link.meet(other.about())
        self.parts = []
        for r, link in enumerate(links):
            tensors = [[w[plan[r]].clone(), s[plan[r]].clone()] for w, s in zip(self.weights, self.scales)]
            places = [expert.spread(experts, Axis(size=n), how.spare) for _ in range(layers)]
            held = Experts(tensors, places, torch.zeros(layers, slots.total + 1, dtype=torch.int64), slots)
            rows = held.rows()
            mover = LinkMover(link, r, n, rows, staging(rows), shown(layers, slots), lambda about: names)
            every = plan.flatten().numpy()[None].repeat(layers, 0)
            self.parts.append(Rebalancer(held, mover, every, how, time.monotonic))

    def step(self) -> None:
        rows = np.array([p.row() for p in self.parts])
        for part in self.parts:
            part.agreed(rows, True)
        self.check()
        for part in self.parts:
            for layer, load in enumerate(part.held.load):
                load[: part.held.slots.total] += torch.from_numpy(self.routed(part, layer))
        time.sleep(0.001)

    def routed(self, part: Rebalancer, layer: int) -> np.ndarray:
        p = self.popular[(np.arange(len(self.popular)) + 2 * layer) % len(self.popular)]
        load = self.rng.multinomial(400, p / p.sum())
        return np.floor(metric.slot_loads(load[None], part.plan[layer][None])[0]).astype(np.int64)

    def check(self) -> None:
        """All ranks have one plan, their placements say so, and slots hold what it says, weight and scale."""
        plan = self.parts[0].plan
        for r, part in enumerate(self.parts):
            assert (part.plan == plan).all()
            mine = torch.from_numpy(plan).view(len(plan), len(self.parts), -1)[:, r]
            for layer, (weight, scale) in enumerate(part.held.tensors):
                assert torch.equal(weight, self.weights[layer][mine[layer]])
                assert torch.equal(scale, self.scales[layer][mine[layer]])
                want = expert.placement(
                    torch.from_numpy(plan[layer]), part.held.slots.experts, part.held.slots.replicas
                )
                assert torch.equal(part.held.places[layer].replicas, want.replicas)
                assert torch.equal(part.held.places[layer].counts, want.counts)

    def run(self, until: Any, limit_s: float = 30) -> float:
        """Step until it is so on all ranks; seconds."""
        begin = time.monotonic()
        while not all(until(p.counts) for p in self.parts):
            self.step()
            assert time.monotonic() - begin < limit_s, [p.counts for p in self.parts]
        return time.monotonic() - begin

    def close(self) -> None:
        for part in self.parts:
            part.close()


HOW = Eplb(True, interval_steps=8, window_steps=8, redundant=6, min_gain=0.02, timeout_s=20)


@pytest.fixture
def trio():
    made = Ranks(how=HOW)
    yield made
    made.close()


def test_rounds_make_the_load_even_and_then_leave_it_alone(trio):
    trio.run(lambda c: c.rounds >= 2)
    first = trio.parts[0].counts
    assert first.layers > 0 and first.abandoned == 0
    trio.run(lambda c: c.rounds >= 4)
    assert first.balance["before"] > 0.9, "later load, on the placement as it was"
    assert sum(p.counts.checked for p in trio.parts) > 0
    assert all(p.counts.layers == first.layers for p in trio.parts)
    before = first.layers
    trio.run(lambda c: c.rounds >= 6)
    assert first.layers <= before + 2, "the same load, and experts go on moving"


def test_a_load_that_moves_on_is_followed(trio):
    trio.run(lambda c: c.rounds >= 2)
    moved = trio.parts[0].counts.layers
    trio.popular = trio.popular[::-1].copy()
    trio.run(lambda c: c.rounds >= 5)
    assert trio.parts[0].counts.layers > moved and trio.parts[0].counts.balance["before"] > 0.85


@pytest.mark.parametrize("step", ["fetch", "first", "total"])
def test_failure_13_a_stuck_peer_is_abandoned_by_all_together(step):
    """A thread that never comes back, on any one rank, in any step of a round."""
    made, gate = Ranks(how=replace(HOW, timeout_s=0.5)), threading.Event()
    setattr(made.parts[0 if step == "total" else 1].mover, step, lambda *_: gate.wait())
    took = made.run(lambda c: c.abandoned == 1)
    assert took < 10
    assert any("no progress for 0.5 s" in reason for p in made.parts for reason in p.counts.reasons)
    for _ in range(50):
        made.step()  # the stuck one is not idle: no round begins, steps go on
    assert all(p.counts.abandoned == 1 and p.round is None for p in made.parts)
    gate.set()
    made.close()


def test_rounds_begin_again_when_a_slow_peer_is_back():
    made, gate = Ranks(how=replace(HOW, timeout_s=0.5)), threading.Event()
    fetch = made.parts[1].mover.fetch
    made.parts[1].mover.fetch = lambda *args: (gate.wait(), fetch(*args))
    made.run(lambda c: c.abandoned == 1)
    made.parts[1].mover.fetch = fetch
    gate.set()
    made.run(lambda c: c.rounds >= 1 and c.layers > 0)
    made.close()


def test_failure_18_scales_that_stay_behind_are_seen_and_no_layer_is_swapped(trio):
    part = trio.parts[2]
    fetch = part.mover.fetch

    def most(*args: Any) -> None:
        part.mover.staging[1].zero_()
        fetch(*args)
        part.mover.staging[1].zero_()

    part.mover.fetch = most
    trio.run(lambda c: c.abandoned >= 2)  # each step checks that slots hold what the plan says
    assert any("arrived with another checksum" in reason for reason in part.counts.reasons)
    part.mover.fetch = fetch
    trio.run(lambda c: c.rounds >= 1 and c.layers > 0)


def test_a_link_that_breaks_abandons_the_round(trio):
    def fail(*_: Any) -> None:
        raise LinkError("no such cable")

    trio.parts[1].mover.fetch = fail
    trio.run(lambda c: c.abandoned >= 1)
    assert "LinkError: no such cable" in trio.parts[1].counts.reasons[0]
    assert trio.parts[0].counts.reasons[0] == "another rank gave up"


def test_an_idle_group_goes_on_with_a_round_and_begins_none(trio):
    while trio.parts[0].round is None:
        trio.step()
    begin = time.monotonic()
    while trio.parts[0].round is not None:
        rows = np.array([p.row() for p in trio.parts])
        for part in trio.parts:
            part.agreed(rows, False)
        trio.check()
        time.sleep(0.001)
        assert time.monotonic() - begin < 20
    for _ in range(20):
        rows = np.array([p.row() for p in trio.parts])
        for part in trio.parts:
            part.agreed(rows, False)
    assert trio.parts[0].round is None and trio.parts[0].counts.rounds == 1


# --- parts ---


def test_ranks_agree_on_rows_that_have_room_for_the_rider():
    rules = [["*", "replicate"]]
    plain, moving = (parse({"dp": 2}, rules, eplb=Eplb(enabled=e)) for e in (False, True))
    assert row_width(plain) == WIDTH and row_width(moving) == WIDTH + migrate.WIDTH
    assert plain.eplb.spare == 0 and hash(moving) != hash(plain)
    one = Rebalancing({})
    assert len(one.row()) == one.width == migrate.WIDTH, "a model without a drafter, or without experts to move"


def test_failure_16_a_replica_is_chosen_by_position_and_choice_alone():
    plan = torch.tensor([0, 1, 0, 2])
    place = expert.placement(plan, 3, 2)
    assert place.replicas.tolist() == [[0, 2], [1, 1], [3, 3], [4, 4]] and place.counts.tolist() == [2, 1, 1, 1]
    ids, positions = torch.tensor([[0, 1], [0, 2], [3, 3]]), torch.tensor([4, 5, -1])
    assert expert.physical(place, ids, positions).tolist() == [[0, 1], [2, 3], [4, 4]]


def test_first_plan_has_every_expert_and_none_twice_on_a_rank():
    for experts, redundant, n in ((8, 0, 4), (8, 4, 4), (8, 24, 4), (384, 32, 32), (6, 6, 2)):
        plan = expert.first_plan(experts, redundant, n).numpy()
        assert (metric.counts(plan[None], experts) >= 1).all()
        held = np.sort(plan.reshape(n, -1), 1)
        assert (held[:, 1:] != held[:, :-1]).all()
    for bad in ((8, 3, 4), (7, 0, 2), (4, 16, 4)):
        with pytest.raises(ValueError):
            expert.first_plan(*bad)


def test_moves_are_local_where_they_can_be_and_spread_over_senders():
    old, new = np.array([0, 1, 0, 2, 3, 4]), np.array([1, 0, 3, 2, 0, 4])
    assert [(m.to, m.source) for m in moves(old, new, 3)] == [(0, 1), (1, 0), (2, 4), (4, 0)]
    old, new = np.array([0, 1, 0, 2, 3, 4, 5, 6]), np.array([0, 1, 0, 2, 0, 4, 0, 6])
    assert [(m.to, m.source) for m in moves(old, new, 4)] == [(4, 0), (6, 2)]


def test_checksums_see_bytes_places_and_parts():
    a, b = torch.arange(20, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8)
    assert checksum([a, b]) == checksum([a.clone(), b.clone()])
    others = ([b, a], [a.flip(0), b], [a, b + 1], [a, torch.zeros_like(b)])
    assert len({checksum([a, b]), *map(checksum, others)}) == 5


def test_failure_14_background_copies_share_no_communicator_with_the_step():
    with pytest.raises(ValueError, match="must be one of"):
        Eplb(transport="nccl")
