"""Play a workload against an engine or a server, and report.

    python -m scripts.run workload=agentx workload.path=../shared/traces/agentic_weka/agentic_weka_dev.jsonl
    python -m scripts.run workload=azure|mooncake|poisson|prompts [target=http://127.0.0.1:8000]

The report card goes to stdout, progress to stderr; metrics.jsonl (a row per request), result.json, latency.png,
timeline.png and interactivity.png into the run's folder.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace

import numpy as np

from model.cache import Layout
from scripts import build, generate, report, seats
from scripts.build import Settings
from scripts.entry import entry
from scripts.running import requests, show
from scripts.running.bar import bar
from scripts.running.target import ENGINE, connect
from scripts.server import make_engine
from scripts.serving import torchrun
from scripts.serving.groups import berths
from scripts.workloads import AgentX, Prompts
from serve.clock import LoopClock
from serve.load import traces
from serve.load.card import Context, card
from serve.load.client import LoadRequest
from serve.load.drive import Driver, closed_loop, open_loop
from serve.load.filler import vocabulary
from serve.load.lanes import Lanes
from serve.load.trees import Tree


@dataclass
class Job:
    """What is to be played: requests with their times, or trees. ``left_out`` of ``known`` requests are too long;
    ``total`` is how many will be sent, where that is known."""

    rows: list[tuple[float, LoadRequest]] | None
    trees: list[Tree] | None
    left_out: int
    known: int
    total: int | None


def prepare(s: Settings, vocab: np.ndarray, encode) -> Job:
    """Reads, or makes, the workload. Raises ValueError for what cannot be read."""
    w = s.workload
    if isinstance(w, AgentX):
        made = requests.trees(w)
        left_out = sum(t.dropped for t in made)
        return Job(None, made, left_out, left_out + sum(len(t.steps) for t in made), w.max_requests)
    if isinstance(w, Prompts):
        prompts = traces.read_prompts(w.path, w.limit) if w.path is not None else generate.read_prompts(s)[: w.limit]
        planned = requests.texts(prompts, encode, s.max_tokens)
    else:
        planned = requests.flat(w, vocab)
    rows = [(at, replace(r, temperature=w.temperature, seed=s.seed + i)) for i, (at, r) in enumerate(planned.requests)]
    total = min(len(rows), w.max_requests or len(rows))
    return Job(rows, None, planned.left_out, planned.left_out + len(rows), total)


def play(s: Settings, job: Job, driver: Driver, lanes: Lanes | None) -> Coroutine:
    """The workload at work."""
    w = s.workload
    if lanes is not None:
        return lanes.run(w.duration_s, w.drain_s)
    if w.loop == "open":
        return open_loop(driver, job.rows, w.duration_s, w.drain_s)
    return closed_loop(driver, [r for _, r in job.rows], w.concurrency, w.duration_s, w.drain_s)


async def perform(s: Settings, job: Job, vocab: np.ndarray) -> tuple[Driver, Lanes | None, list]:
    """Play to the end. Returns the driver with its records, the lanes, and the engine's steps."""
    w, clock = s.workload, LoopClock()
    async with connect(s, clock) as target:
        with bar(clock, w.duration_s, job.total) as shown:
            driver = Driver(target.client, clock, s.serve.page_size, w.max_requests, shown.ended)
            lanes = Lanes(job.trees, w.settings, driver, clock, vocab) if job.trees is not None else None
            await target.beside(play(s, job, driver, lanes))
        return driver, lanes, getattr(target.client, "steps", [])


def run(s: Settings) -> dict | None:
    if seats.seat().rank:
        return torchrun.serve(s.pools, s.parallel.world, report.run_folder() / "config.yaml", make_engine)
    cfg = build.checkpoint_config(s)
    text = build.build_text(s, cfg)
    vocab = vocabulary(text.vocab_size, text.special_ids())
    job = prepare(s, vocab, text.prompt)
    driver, lanes, steps = asyncio.run(perform(s, job, vocab))
    begin = lanes.begin_s if lanes is not None else min((r.sent_s for r in driver.records), default=0.0)
    w = s.workload
    figures = card(
        driver.records,
        Context(
            gpus=w.gpus or (len(berths(s.pools, s.parallel.world)) if s.target == ENGINE else 1),
            price_per_hour=w.price_per_hour,
            kv_bytes_per_token=Layout(cfg, storage=s.cache, page_size=s.serve.page_size).bytes_per_token,
            left_out=job.left_out,
            known=job.known,
            skipped_s=lanes.agenda.capped_s if lanes is not None else {},
            steps=[x for x in steps if x.at_s >= begin],
        ),
    )
    show.write_rows(report.run_folder() / "metrics.jsonl", driver.records, begin)
    show.plots(driver.records, steps, begin)
    show.print_card(figures)
    return figures | {"workload": w.kind, "target": s.target, "page_size": s.serve.page_size, "seed": w.seed}


if __name__ == "__main__":
    entry(run)
