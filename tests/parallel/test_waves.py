"""Waves: each transition, every order of events of three ranks, and long random schedules."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from parallel import waves
from parallel.waves import Wave


def rows(*flags) -> np.ndarray:
    return np.array(flags, np.int64)


def test_a_wave_from_start_to_end():
    first, announced = waves.wants(Wave())
    assert announced == 0 and first.running
    other = waves.started(Wave(), announced)
    assert other.running and waves.wants(first) == (first, None)
    seen = rows(waves.flags(first, True), waves.flags(other, False))
    assert waves.settle(first, seen) == first and waves.settle(other, seen) == other
    seen = rows(waves.flags(first, False), waves.flags(other, False))
    ended = [waves.settle(s, seen) for s in (first, other)]
    assert [s.wave for s in ended] == [1, 1] and not any(s.running for s in ended)


def test_failure_21_a_rank_without_tokens_runs_the_dummy_step():
    running, _ = waves.wants(Wave())
    assert waves.action(running, 3, 3) == waves.WORK
    assert waves.action(running, 0, 3) == waves.DUMMY
    assert waves.action(running, 0, 0) == waves.SLEEP  # nobody has any: no forward pass, on no rank
    assert waves.action(Wave(), 0, 0) == waves.SLEEP


def test_failure_22_a_stale_start_wakes_nobody_and_a_fresh_one_is_not_lost():
    idle = Wave(wave=3, asked=2)
    assert waves.started(idle, 2) == idle and not waves.started(idle, 1).running
    assert waves.started(idle, 3).running
    ending = Wave(wave=2, asked=2)  # has not seen yet that its wave ended, where another is a wave on
    asked = waves.started(ending, 3)
    assert waves.settle(asked, rows((2, 0, 0), (2, 0, 0))).running
    paused = Wave(wave=3, asked=2, pausing=1, paused=True, generation=1)
    assert not waves.started(paused, 3).running and waves.resume(waves.started(paused, 3), 1).running


def test_pause_needs_all_at_the_same_generation():
    a, announced = waves.pause(Wave(), 1)
    assert announced == 0 and a.running and not a.plans
    b = waves.started(Wave(), 0)
    seen = rows(waves.flags(a, False), waves.flags(b, False))
    assert waves.settle(a, seen) == a and waves.settle(b, seen) == b  # one of two: both keep stepping
    b, announced = waves.pause(b, 1)
    assert announced is None
    later, _ = waves.pause(waves.resume(a, 1), 2)
    seen = rows(waves.flags(later, True), waves.flags(b, True))
    assert waves.settle(later, seen) == later and waves.settle(b, seen) == b  # of different pauses: no consensus
    seen = rows(waves.flags(a, True), waves.flags(b, True))
    for state in (waves.settle(a, seen), waves.settle(b, seen)):
        assert state.paused and not state.running and state.wave == 1
        assert waves.wants(state) == (state, None) and waves.resume(state, 2) == state
        assert waves.pause(state, 1) == (state, None)
        assert waves.resume(state, 1).running


def test_ranks_of_different_waves_are_named():
    with pytest.raises(waves.OutOfStep, match=r"wave 0, ranks \[1\] in \[1\]"):
        waves.settle(Wave(asked=0), rows((0, 1, 0), (1, 1, 0)))


# --- ranks and their messages, whatever happens in whatever order ---


IDLE = Wave()


@dataclass(frozen=True)
class Rank:
    """A rank of the model. It reads messages only outside of the agreement, so that what it gets in there comes
    later."""

    row: tuple = ()  # in the agreement, waiting: what it brought
    state: Wave = IDLE
    load: int = 0  # steps of work it has
    comes: int = 0  # that will still come
    read: int = 0  # messages of the controller
    starts: tuple = ()  # on their way to it


World = tuple[Rank, ...]
PAUSES = (("pause", 1), ("resume", 1), ("pause", 2), ("resume", 2))


@cache
def met(rank: Rank, seen: tuple) -> Rank:
    """A rank leaves an agreement and runs the step."""
    before = rank.state
    load = rank.load - (before.plans and rank.load > 0)
    return replace(rank, row=(), state=waves.settle(before, rows(*seen)), load=load)


@cache
def events(rank: Rank, script: tuple) -> tuple[tuple[Rank, int | None], ...]:
    """What can happen to a rank outside of the agreement, and the wave it then announces."""
    state, out = rank.state, []
    if rank.comes:
        new, announced = waves.wants(state)
        out.append((replace(rank, state=new, load=rank.load + 1, comes=rank.comes - 1), announced))
    if rank.read < len(script):
        kind, generation = script[rank.read]
        new, announced = waves.pause(state, generation) if kind == "pause" else (waves.resume(state, generation), None)
        out.append((replace(rank, state=new, read=rank.read + 1), announced))
    for start in rank.starts:
        left = tuple(w for w in rank.starts if w != start)
        out.append((replace(rank, state=waves.started(state, start), starts=left), None))
    if state.running:
        out.append((replace(rank, row=waves.flags(state, rank.load > 0)), None))
    return tuple(out)


def meet(world: World) -> World:
    seen = tuple(r.row for r in world)
    return tuple(met(r, seen) for r in world)


def changed(world: World, i: int, rank: Rank, announced: int | None) -> World:
    if announced is not None:
        world = tuple(replace(r, starts=tuple(sorted({*r.starts, announced}))) for r in world)
    return (*world[:i], rank, *world[i + 1 :])


def alike(world: Iterable[Rank]) -> World:
    """The same world whichever rank is which, as all are alike: in some order that depends on their values alone."""
    return tuple(sorted(world, key=hash))


def moves(world: World, script: tuple) -> list[World]:
    """Every world that can come next."""
    if all(r.row for r in world):
        return [alike(meet(world))]
    out = []
    for i, rank in enumerate(world):
        if not rank.row:
            out += [alike(changed(world, i, *event)) for event in events(rank, script)]
    return out


def done(world: World, script: tuple) -> bool:
    """Nothing is left to happen, and all is well: no work left over, nobody waits, nobody runs."""
    return all(not (r.row or r.load or r.comes or r.starts or r.state.running) and r.read == len(script) for r in world)


@pytest.mark.parametrize(
    ("comes", "script"),
    [((2, 1, 1), ()), ((0, 0, 0), PAUSES), ((0, 0, 1), PAUSES[:2])],
    ids=["starts", "pauses", "both"],
)
def test_failure_22_every_order_of_events_of_three_ranks_ends_well(comes, script):
    """Exhaustive: every state that can be reached can still reach the end. A hang, a lost start, a rank that sleeps
    while others wait in the agreement would be a state that cannot; ranks that meet in different waves would raise."""
    first = alike(Rank(comes=c) for c in comes)
    number, back, queue = {first: 0}, [[]], deque([first])
    while queue:
        world = queue.popleft()
        for new in moves(world, script):
            if new not in number:
                number[new] = len(number)
                back.append([])
                queue.append(new)
            back[number[new]].append(number[world])
    ends = [i for world, i in number.items() if done(world, script)]
    good, stack = set(ends), list(ends)
    while stack:
        for before in back[stack.pop()]:
            if before not in good:
                good.add(before)
                stack.append(before)
    assert ends and len(good) == len(number) > 100


@pytest.mark.parametrize("size", [2, 5, 8])
def test_random_schedules(size):
    """Work, pauses and late messages at random, 10^5 steps of ranks in the three cases; then all work gets done."""
    rng = np.random.default_rng(size)
    world, steps, script = tuple(Rank() for _ in range(size)), 0, []
    while not (steps >= 34_000 and done(world, script)):
        for pick, chance, choice in rng.random((500, 3)):
            free = [i for i, r in enumerate(world) if not r.row]
            i = free[int(pick * len(free))]
            rank = world[i]
            if steps < 34_000 and chance < 0.01:
                world = changed(world, i, replace(rank, comes=rank.comes + 20), None)
                continue
            if steps < 34_000 and chance < 0.012 and all(r.read == len(script) for r in world):
                script += [("pause", 1 + len(script) // 2), ("resume", 1 + len(script) // 2)]
            if rank.state.running and choice < 0.7:
                possible = [(replace(rank, row=waves.flags(rank.state, rank.load > 0)), None)]
            else:
                possible = happens(rank, tuple(script[rank.read :]))
            if possible:
                world = changed(world, i, *possible[int(chance * len(possible))])
                if all(r.row for r in world):
                    world = meet(world)
                    steps += size


def happens(rank: Rank, script: tuple) -> list[tuple[Rank, int | None]]:
    """`events`, of a rank that has read what came before ``script``."""
    out = events.__wrapped__(replace(rank, read=0), script)
    return [(replace(new, read=rank.read + new.read), announced) for new, announced in out]
