"""The engine against the plain loop it must not be slower than: decode steps by batch size, prefill by length.

Both drive one runner in turns with the same prompts; a step's time runs from one delivery of tokens to the next, so all
host work counts. Their tokens must be equal, or there is no figure.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from scripts import report
from scripts.build import Settings, build_device, build_model
from scripts.progress import progress
from scripts.serving.engine import engine_on, runner_of
from serve import offline
from serve.mailbox import Mailbox
from serve.request import Ask, Outputs, Sampling
from serve.runner import Runner
from serve.settings import Serve

BATCHES = (8, 16, 32, 64, 128, 256)
PROMPT, TOKENS = 16, 40  # of a decode measurement
LENGTHS = (256, 1024, 4096, 16384)  # of a prefill measurement
TURNS = {256: 5, 1024: 3, 4096: 2}  # others once each way


@dataclass
class Run:
    """One way through the prompts: tokens by request, and seconds of the steps in which all of them gained one."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    total: float = 0.0


class Steps:
    """Times of consecutive deliveries to every one of ``batch`` requests."""

    def __init__(self, run: Run, batch: int):
        self.run, self.batch, self.last = run, batch, None

    def delivered(self, count: int) -> None:
        now = time.perf_counter()
        if count == self.batch and self.last is not None:
            self.run.steps.append(now - self.last)
        self.last = now if count == self.batch else None


def plain(runner: Runner, prompts: Sequence[np.ndarray], tokens: int) -> Run:
    """serve/offline.py."""
    run, told = Run(), []
    steps = Steps(run, len(prompts))

    def on_tokens(index: int, new: list[int]) -> None:
        run.tokens.setdefault(index, []).extend(new)
        told.append(index)
        if index == len(prompts) - 1:  # the last of a step
            steps.delivered(len(told))
            told.clear()

    begin = time.perf_counter()
    offline.generate(runner, prompts, [Sampling(tokens)] * len(prompts), on_tokens=on_tokens)
    run.total = time.perf_counter() - begin
    return run


def served(runner: Runner, serve: Serve, prompts: Sequence[np.ndarray], tokens: int) -> Run:
    """The engine, all requests sent at once."""
    run = Run()
    steps = Steps(run, len(prompts))

    def deliver(out: Outputs) -> None:
        for handle, tokens, _ in out.each():
            run.tokens.setdefault(handle - 1, []).extend(tokens)
        steps.delivered(len(out.handles))

    mail = Mailbox(deliver)
    engine = engine_on(runner, serve, False, mail)
    for i, prompt in enumerate(prompts, start=1):
        mail.send(Ask(i, prompt.astype(np.int32), [], Sampling(tokens)))

    async def drain() -> None:
        await engine.step()
        while not engine.scheduler.idle:
            await engine.step()

    begin = time.perf_counter()
    asyncio.run(drain())
    run.total = time.perf_counter() - begin
    engine.device.close()
    return run


def compare(ways: Sequence[Callable[[], Run]], turns: int) -> list[list[Run]]:
    """Each way ``turns`` times, alternating. Raises ValueError where tokens differ."""
    runs: list[list[Run]] = [[] for _ in ways]
    for turn in range(turns):
        order = range(len(ways)) if turn % 2 == 0 else reversed(range(len(ways)))
        for i in order:
            runs[i].append(ways[i]())
    first = runs[0][0].tokens
    if any(run.tokens != first for way in runs for run in way):
        raise ValueError("bench=engine: engine and plain loop drew different tokens; no figures")
    return runs


def run(s: Settings) -> dict:
    """Two tables; keys ``ratio_b{N}`` (decode rate, engine over plain) and ``prefill_ratio_{n}`` (likewise)."""
    model, _ = build_model(s)
    pages = max(max(BATCHES) * -(-(PROMPT + TOKENS + 8) // s.serve.page_size), LENGTHS[-1] // s.serve.page_size + 1)
    serve = replace(s.serve, max_batch=max(BATCHES), pages=pages, budget_tokens=512, window="none")
    runner = runner_of(model, serve, build_device(s))
    rng, vocab = np.random.default_rng(0), model.cfg.vocab_size
    decode, prefill, out = [], [], {}
    with progress("bench=engine", len(BATCHES) + len(LENGTHS), "points") as advance:
        for batch in BATCHES:
            prompts = list(rng.integers(4, vocab, (batch, PROMPT)))
            ways = (lambda p=prompts: plain(runner, p, TOKENS), lambda p=prompts: served(runner, serve, p, TOKENS))
            a, b = ([t for r in way for t in r.steps] for way in compare(ways, 3 if batch < 128 else 2))
            ratio = median(a) / median(b)
            decode.append([batch, median(a) * 1e3, median(b) * 1e3, ratio])
            out[f"ratio_b{batch}"] = round(ratio, 3)
            advance(1)
        for length in LENGTHS:
            prompts = [rng.integers(4, vocab, length)]
            ways = (lambda p=prompts: plain(runner, p, 1), lambda p=prompts: served(runner, serve, p, 1))
            a, b = ([r.total for r in way] for way in compare(ways, TURNS.get(length, 1)))
            ratio = median(a) / median(b)
            prefill.append([length, median(a), median(b), ratio])
            out[f"prefill_ratio_{length}"] = round(ratio, 3)
            advance(1)
    report.table("engine_decode", ("batch", "plain ms", "engine ms", "ratio"), decode)
    report.table("engine_prefill", ("prompt", "plain s", "engine s", "ratio"), prefill)
    return {**out, "numerics": s.numerics, "threads": s.threads, "overlap": serve.overlap}
