"""Host work of a step: plan, settle and update with 256 running requests, prompts of 1k against 855k, with drafts; and
the inputs that a step is made of.

Nothing is run on a device. The scheduler gets there by its own interface: one long prompt is prefilled, the others
share it and are prefix hits, each with page tables of its own; lengths are staggered, so that in every step a few
sequences (4 of 256, without drafts) fill a page and take another, and every page taken is one that was cached. The
sides take turns. Times are those of the thread, so that a busy machine counts less; wall clock is shown beside it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from types import SimpleNamespace

import numpy as np

from scripts import report
from scripts.build import Settings
from scripts.progress import progress
from serve.lockstep import Shape
from serve.request import Ask, Sampling
from serve.schedule.pages import chain
from serve.schedule.plan import Drawn, Plan
from serve.schedule.policies import fcfs
from serve.schedule.scheduler import Scheduler
from serve.settings import Limits, Serve
from serve.step import Step
from serve.tables import PageTable

PAGE_SIZE = 64
BATCH = 256
BUDGET = 2048  # rows of a step: room for 256 sequences with 4 drafts each
DRAFTS = 4
STEPS = 50  # timed steps of a turn
TURNS = 10
WARM = 2 * PAGE_SIZE
VOCAB = 129_280
WINDOW, LAYERS = 128, 40


@dataclass(frozen=True)
class Side:
    """A scheduler with ``batch`` decoding sequences, and the seconds of its steps: of the thread, by the wall; and of
    the thread to make their inputs for ``runner``, which has a page table and runs nothing."""

    name: str
    key: str
    scheduler: Scheduler
    rng: np.random.Generator
    times: list[float]
    walls: list[float]
    inputs: list[float]
    runner: SimpleNamespace

    def step(self) -> None:
        s = self.scheduler
        draws = self.rng.integers(0, VOCAB, (len(s.running), 1 + s.limits.drafts))
        drawn = Drawn(draws, self.rng.integers(1, 2 + s.limits.drafts, len(s.running)))
        wall, begin = time.perf_counter(), time.thread_time()
        plan = s.settle(s.plan())
        planned = time.thread_time(), time.perf_counter()
        Step(self.runner, s.serve, plan, Shape())
        made = time.thread_time(), time.perf_counter()
        s.update(plan, drawn)
        self.inputs.append(made[0] - planned[0])
        self.times.append(time.thread_time() - begin - (made[0] - planned[0]))
        self.walls.append(time.perf_counter() - wall - (made[1] - planned[1]))


def side(name: str, key: str, batch: int, prompt: int, drafts: int, steps: int) -> Side:
    """``batch`` sequences with prompts of about ``prompt`` tokens, most of it shared; room to decode for ``steps``. All
    pages that they will take are cached ones of another prompt."""
    rng = np.random.default_rng(0)
    made = steps * (1 + drafts) + PAGE_SIZE
    spare = batch * (2 + made // PAGE_SIZE)
    pages = -(-prompt // PAGE_SIZE) + batch + spare
    serve = Serve(PAGE_SIZE, pages, batch, budget_tokens=BUDGET, long_prefill_tokens=BUDGET, window="replay")
    context = max(prompt + made, spare * PAGE_SIZE)
    s = Scheduler(Limits(serve, context, WINDOW, LAYERS, drafts), fcfs.key)
    other = rng.integers(0, VOCAB, spare * PAGE_SIZE - 1, np.int32)
    s.add([Ask(1 + batch, other, chain(other, PAGE_SIZE), Sampling(1))])
    while not s.idle:
        prefill(s, s.settle(s.plan()))
    tokens = rng.integers(0, VOCAB, prompt, np.int32)
    names = chain(tokens, PAGE_SIZE)
    for i in range(batch):
        own = tokens[: prompt - i % min(batch, prompt // 2)]
        s.add([Ask(1 + i, own, names[: len(own) // PAGE_SIZE], Sampling(made))])
        while s.waiting or len(s._decoding) <= i:
            prefill(s, s.settle(s.plan()))
    assert len(s.running) == batch and s.counts["preempted"] == 0
    table = PageTable(batch + 1, -(-context // PAGE_SIZE))
    runner = SimpleNamespace(table=table, model=SimpleNamespace(layout=SimpleNamespace(token_depth=WINDOW)))
    return Side(name, key, s, rng, [], [], [], runner)


def prefill(s: Scheduler, plan: Plan) -> None:
    """A step in which decoding sequences draw nothing new: they are to stay where they are until all have come."""
    counts = np.zeros(len(plan), np.int64)
    counts[len(plan.decode) :] = [p.last for p in plan.prefills]
    s.update(plan, Drawn(np.zeros((len(plan), 1), np.int64), counts))


def measure(sides: Sequence[Side], steps: int, turns: int, warm: int) -> None:
    """Fill the sides' times, in turns."""
    for one in sides:
        for _ in range(warm):
            one.step()
        for figures in (one.times, one.walls, one.inputs):
            figures.clear()
    with progress("bench=scheduler", turns, "turns") as advance:
        for _ in range(turns):
            for one in sides:
                for _ in range(steps):
                    one.step()
            advance(1)


def run(s: Settings, batch: int = BATCH, long: int = 855_000, steps: int = STEPS, turns: int = TURNS) -> dict:
    """Table of host times; keys ``step_us_256``, ``step_us_256_855k``, ``step_us_256_drafts``, and each with
    ``_inputs``."""
    every = WARM + steps * turns
    sides = (
        side("prompts of 1k", f"step_us_{batch}", batch, 1000, 0, every),
        side("prompts of 855k", f"step_us_{batch}_855k", batch, long, 0, every),
        side(f"prompts of 1k, {DRAFTS} drafts", f"step_us_{batch}_drafts", batch, 1000, DRAFTS, every),
    )
    measure(sides, steps, turns, WARM)
    rows, result = [], {}
    for one in sides:
        low, _, high = quantiles(one.times, n=4)
        p99 = quantiles(one.times, n=100)[-1]
        us = [t * 1e6 for t in (median(one.times), low, high, p99, median(one.walls), median(one.inputs))]
        rows.append([f"{batch}, {one.name}", *us])
        names = (one.key, f"{one.key}_p99", f"{one.key}_wall", f"{one.key}_inputs")
        result |= {name: round(us[i], 1) for name, i in zip(names, (0, 3, 4, 5), strict=True)}
    columns = ("running", "host us per step", "p25", "p75", "p99", "by the wall", "its inputs, us")
    report.table("scheduler", columns, rows)
    return result
