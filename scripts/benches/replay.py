"""What bounded replay saves in prefill, layer by layer: rows and time, measured, beside what spec section 13 predicts.

Rows are counted where a layer's pieces are called. Time is predicted from the full run: a layer's time a row, times the
rows it has left. The global rows of all forms must be equal bit for bit, or there is no figure.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model import block
from model.config import ModelConfig
from scripts import report
from scripts.benches.engine import served
from scripts.build import Settings, build_device, build_model
from scripts.progress import progress
from scripts.serving.engine import runner_of
from serve.schedule.windows import PREFILLS

LENGTH = 4096  # tokens of the prompt
TURNS = 3  # of each form; a layer's time is its least, since other work on the machine only adds
QUERIES = {block.attention_half: 3, block.narrow_half: 6}  # pieces that run queries -> where their Address is
KEYS = {block.publish: 2, block.block_keys: 2}


@dataclass
class Tally:
    """Of each layer: rows that attention queried, rows that ran through experts, seconds."""

    queries: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    experts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def watching(self, jit: Callable) -> Callable:
        """A `jit` whose pieces are counted and timed."""

        def watched(fn: Callable, *static: Any) -> Callable:
            piece = jit(fn, *static)
            return piece if fn not in {**QUERIES, **KEYS, block.expert_half: 0} else lambda *a: self._call(fn, piece, a)

        return watched

    def _call(self, fn: Callable, piece: Callable, args: tuple) -> Any:
        begin = time.perf_counter()
        out = piece(*args)
        took = time.perf_counter() - begin
        if fn is block.expert_half:
            positions, layer = args[6], int(args[8])
            self.experts[layer] += int((positions >= 0).sum())
        else:
            layer = int(args[{**QUERIES, **KEYS}[fn]].layer)
            batch = next(a for a in args if hasattr(a, "positions"))
            self.queries[layer] += int((batch.positions >= 0).sum()) if fn in QUERIES else 0
        self.seconds[layer] += took
        return out


def predicted(cfg: ModelConfig, prefill: str, layer: int) -> int:
    """Rows that a layer's queries and experts run on, of a prompt of LENGTH tokens (spec sections 13.2 and 13.3)."""
    cut = {"full": cfg.num_hidden_layers, "decoder_replay": cfg.last_source + 1, "layer20_replay": cfg.last_source}
    return LENGTH if layer < cut[prefill] else min(LENGTH, cfg.sliding_window)


def measure(s: Settings, model, prefill: str, prompt: np.ndarray) -> tuple[Tally, Tensor, float]:
    """Counts, global pages and seconds of one prefill."""
    serve = replace(
        s.serve, prefill=prefill, window="none", max_batch=2, pages=LENGTH // s.serve.page_size + 2, budget_tokens=512
    )
    runner, tally = runner_of(model, serve, build_device(s)), Tally()
    served(runner, serve, [prompt[:64]], 1)  # warm
    runner.cache.pages.zero_()
    runner.model = replace(runner.model, jit=tally.watching(runner.model.jit))
    run = served(runner, serve, [prompt], 1)
    stride = model.layout.stride
    return tally, runner.cache.pages[stride:].clone(), run.total


def least(runs: list[tuple[Tally, Tensor, float]]) -> tuple[Tally, Tensor, float]:
    """Of several runs of a form: its counts and pages, and the least times."""
    tally, pages, _ = runs[0]
    for layer in tally.seconds:
        tally.seconds[layer] = min(t.seconds[layer] for t, _, _ in runs)
    return tally, pages, min(total for _, _, total in runs)


def run(s: Settings) -> dict:
    """Table by layer; keys ``rows_ok``, ``time_ratio_{form}``, ``predicted_ratio_{form}``, ``pages_equal``."""
    model, _ = build_model(s)
    cfg = model.cfg
    prompt = np.random.default_rng(0).integers(4, cfg.vocab_size, LENGTH)
    with progress("bench=replay", TURNS * len(PREFILLS), "prefills") as advance:
        runs: dict[str, list] = {prefill: [] for prefill in PREFILLS}
        for prefill in PREFILLS * TURNS:
            runs[prefill].append(measure(s, model, prefill, prompt))
            advance(1)
    made = {prefill: least(each) for prefill, each in runs.items()}
    full = made["full"][0]
    if not all(torch.equal(pages, made["full"][1]) for _, pages, _ in made.values()):
        raise ValueError("bench=replay: global rows differ from those of the whole prefill; no figures")
    wrong, rows, out = 0, [], {}
    for layer in range(cfg.num_hidden_layers):
        for prefill in PREFILLS:
            t, want = made[prefill][0], predicted(cfg, prefill, layer)
            guess = full.seconds[layer] * want / LENGTH
            wrong += (t.queries[layer], t.experts[layer]) != (want, want)
            rows.append([layer, prefill, t.experts[layer], want, t.seconds[layer] * 1e3, guess * 1e3])
    report.table("replay", ("layer", "prefill", "rows", "rows predicted", "ms", "ms predicted"), rows)
    whole = sum(full.seconds.values())
    for prefill in PREFILLS[1:]:
        guess = sum(full.seconds[i] * predicted(cfg, prefill, i) / LENGTH for i in range(cfg.num_hidden_layers))
        out[f"layers_ratio_{prefill}"] = round(whole / sum(made[prefill][0].seconds.values()), 3)
        out[f"predicted_ratio_{prefill}"] = round(whole / guess, 3)
        out[f"prefill_ratio_{prefill}"] = round(made["full"][2] / made[prefill][2], 3)
    return {**out, "pages_equal": True, "failed": wrong, "tokens": LENGTH, "numerics": s.numerics}
