"""Steps while experts move against steps while none do, in one run: DEP4 decodes, rounds come and go.

Rounds go from the first plan to one by load and back, so that there is always something to move. Tokens must be those
of one rank that holds everything, or there is no figure. Without `parallel=dep` the plan is DEP4, 4 slots redundant.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from parallel import mesh
from parallel.agree import node
from parallel.eplb import policy
from parallel.eplb.policy import Slots
from parallel.expert import first_plan
from parallel.mesh import Seat
from parallel.plan import Plan
from scripts import report
from scripts.benches.processes import each_rank
from scripts.build import CONF, Settings, build_plan, build_runner, build_settings, checkpoint_config
from scripts.progress import progress
from scripts.serving.engine import build_engine, row_width
from serve import offline
from serve.mailbox import Mailbox
from serve.request import Ask, Outputs, Sampling

RANKS, BATCH, PROMPT, TOKENS = 4, 4, 16, 120  # requests a rank, tokens of each
INTERVAL = 24  # steps from the end of a round to the next


@dataclass
class Told:
    """What a rank says. ``steps``: seconds, whether a round was under way, seconds of these that the rider took."""

    tokens: dict[int, list[int]]
    steps: list[tuple[float, bool, float]]
    counts: dict[str, Any]


def swinging(slots: Slots) -> Any:
    """By load, back to the first plan, by load, ..."""
    first, calls = first_plan(slots.experts, slots.redundant, slots.ranks).numpy(), []

    def planner(load: np.ndarray, plan: np.ndarray, rows: np.ndarray) -> np.ndarray:
        calls.append(1)
        if len(calls) % 2 == 0:
            return np.tile(first, (len(plan), 1))
        return policy.plan(load, slots, plan, rows, pause=lambda: time.sleep(0))

    return planner


def prompts(s: Settings) -> np.ndarray:
    vocab = checkpoint_config(s).vocab_size
    return np.random.default_rng(0).integers(4, vocab, (s.parallel.world * BATCH, PROMPT)).astype(np.int32)


def rank_main(rank: int, tell: Callable, size: int, config: Path, folder: str, board: str) -> None:
    """The process of one rank. ``config``: the resolved one of the run."""
    try:
        seat = Seat(rank, size, f"{folder}/ranks", board)
        tell(decode(planned(build_settings(OmegaConf.load(config))), seat))
    finally:
        mesh.leave()


def decode(s: Settings, seat: Seat) -> Told:
    torch.set_num_threads(1)
    told, left = Told({}, [], {}), set()

    def deliver(outputs: Outputs) -> None:
        for handle, tokens, _ in outputs.each():
            told.tokens.setdefault(handle, []).extend(tokens)
        left.difference_update(f.handle for f in outputs.finished)
        if not left:
            engine.stop()

    mail = Mailbox(deliver)
    engine, _ = build_engine(s, mail, seat, swinging)
    for i, prompt in enumerate(prompts(s)[seat.rank :: seat.size]):
        left.add(i)
        mail.send(Ask(i, prompt, [], Sampling(TOKENS)))
    parts = engine.lockstep.rider.parts
    spent = lambda: sum(p.counts.seconds for p in parts.values())  # noqa: E731
    last = [time.perf_counter(), False, spent()]

    async def between() -> None:
        now, moving, own = time.perf_counter(), any(p.round is not None for p in parts.values()), spent()
        told.steps.append((now - last[0], last[1] or moving, own - last[2]))
        last[:] = now, moving, own

    asyncio.run(engine.run(between))
    fields = ("rounds", "abandoned", "layers", "bytes")
    told.counts = {f: sum(getattr(p.counts, f) for p in parts.values()) for f in fields}
    return told


def planned(s: Settings) -> Settings:
    """With the plan of the command line, or DEP4; rounds follow each other closely."""
    plan: Plan = s.parallel
    if plan.world == 1:
        values = OmegaConf.load(CONF / "parallel" / "dep.yaml")
        values.axes.dp = RANKS
        plan = build_plan(values, checkpoint_config(s))
        plan = replace(plan, eplb=replace(plan.eplb, redundant=RANKS))
    eplb = replace(plan.eplb, enabled=True, interval_steps=INTERVAL, window_steps=INTERVAL)
    serve = replace(s.serve, max_batch=BATCH, pages=BATCH * (-(-(PROMPT + TOKENS + 8) // s.serve.page_size) + 1))
    return replace(s, parallel=replace(plan, eplb=eplb), serve=serve)


def ranks(s: Settings, config: Path) -> list[Told]:
    """One process a rank. Raises ValueError with what a rank could not do."""
    size = s.parallel.world
    board = node.create(size, row_width(s.parallel))
    with tempfile.TemporaryDirectory(prefix="racklab-") as folder:
        return each_rank(size, rank_main, (size, config, folder, board.address))


def check(s: Settings, told: list[Told]) -> None:
    """Raise ValueError unless tokens are those of the plain loop on one rank."""
    single = build_plan(OmegaConf.load(CONF / "parallel" / "single.yaml"), checkpoint_config(s))
    serve = replace(s.serve, max_batch=s.serve.max_batch * s.parallel.world, pages=s.serve.pages * s.parallel.world)
    runner, _ = build_runner(replace(s, parallel=single, serve=serve))
    want: dict[int, list[int]] = {}
    take = lambda i, new: want.setdefault(i, []).extend(new)  # noqa: E731
    given = list(prompts(s))
    offline.generate(runner, given, [Sampling(TOKENS)] * len(given), on_tokens=take)
    for i in range(len(given)):
        if told[i % s.parallel.world].tokens[i // s.parallel.world] != want[i]:
            raise ValueError("bench=migrate: tokens differ from those of one rank; no figures")


def run(s: Settings) -> dict:
    """Keys ``median_before_ms``, ``median_during_ms``, ``ratio``, ``p99_*``, ``step_share``, and what moved."""
    s = planned(s)
    with progress("bench=migrate", 2, "runs") as advance:
        told = ranks(s, report.run_folder() / "config.yaml")
        advance(1)
        check(s, told)
        advance(1)
    steps = told[0].steps[4:]  # all ranks take the same steps; the first ones prefill
    quiet, moving = (np.array([t for t, m, _ in steps if m == during]) * 1e3 for during in (False, True))
    own = np.array([o for _, during, o in steps if during]) * 1e3
    if not len(quiet) or not len(moving):
        raise ValueError("bench=migrate: no round was under way, or always one; no figures")
    before, during = float(np.median(quiet)), float(np.median(moving))
    out = {
        "median_before_ms": before, "median_during_ms": during, "ratio": during / before,
        "p99_before_ms": float(np.percentile(quiet, 99)), "p99_during_ms": float(np.percentile(moving, 99)),
        "step_share": float(own.mean()) / before, "step_share_max": float(own.max()) / before,
    }  # fmt: skip
    report.table("migrate", ["figure", "value"], [[name, value] for name, value in out.items()])
    with report.plot("migrate") as (ax,):
        times = np.array([t for t, _, _ in steps]) * 1e3
        ax.plot(times, lw=0.8)
        ax.fill_between(range(len(steps)), 0, times.max(), where=[m for _, m, _ in steps], alpha=0.15, label="a round")
        ax.set(xlabel="step", ylabel="ms")
        ax.legend()
    moved = {f: sum(t.counts[f] for t in told) for f in ("layers", "bytes")}
    rounds = {f: told[0].counts[f] for f in ("rounds", "abandoned")}
    how = {"ranks": s.parallel.world, "transport": s.parallel.eplb.transport, "redundant": s.parallel.eplb.redundant}
    rounded = {name: round(value, 4) for name, value in out.items()}
    return {**rounded, **rounds, **moved, "steps_before": len(quiet), "steps_during": len(moving), **how}
