"""Decode steps: the reference bodies in eager against the same bodies compiled, by batch size.

Both run the same weights, tokens and positions; they take turns, and each side's median step is compared. Whether they
agree is checked first: no number from a red run.
"""

import time
from dataclasses import replace
from statistics import median, quantiles

import numpy as np
import torch

from kernels import choose
from model.transformer import Model
from scripts import report
from scripts.build import Settings, build_model
from scripts.laid import Laid
from scripts.progress import progress
from scripts.verification.case import relative_rms
from serve.runner import Runner

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128  # tokens in the cache before the first timed step
STEPS = 6  # timed steps of a turn
TURNS = 5
# Relative RMS of logits. Quantisers amplify a product that rounds the other way: summation order alone moves the
# official code's logits by up to 0.63 (golden README), so that in qat only gross errors show here; verify judges it
# layer by layer.
TOLERANCE = {"fp32": 1e-4, "qat": 0.6}


def fill(laid: Laid, tokens: np.ndarray) -> None:
    """Fill the cache with tokens [B, CONTEXT], two sequences a step."""
    for i in range(0, len(tokens), 2):
        spans = [laid.span(j, tokens[j], 0) for j in range(i, min(i + 2, len(tokens)))]
        laid.runner.step(spans, torch.arange(1))


def sides(model: Model) -> tuple[Laid, Laid]:
    """Reference and compile, each with room for the largest batch."""
    steps = CONTEXT + STEPS * TURNS + 2
    each = -(-steps // model.layout.page_size)
    made = []
    for name in ("reference", "compile"):
        chosen = replace(model, rt=replace(model.rt, kernels=choose(name)))
        made.append(Laid(Runner(chosen, 1 + each * max(BATCHES), 1 + max(BATCHES)), each))
    return tuple(made)


def measure(both: tuple[Laid, Laid], batch: int, numerics: str) -> list[list[float]]:
    """Step times of each side at one batch size, in turns; the same tokens at the same positions."""
    rng = np.random.default_rng(batch)
    vocab = both[0].runner.model.cfg.vocab_size
    prompt = rng.integers(0, vocab, (batch, CONTEXT))
    tokens = rng.integers(0, vocab, (batch, 2 + STEPS * TURNS))
    for side in both:
        fill(side, prompt)
    first = [side.decode(tokens[:, 0], CONTEXT) for side in both]
    error = relative_rms(first[1], first[0])
    if not error <= TOLERANCE[numerics]:
        raise ValueError(f"bench=decode: compile differs from reference by {error:.3g} at batch {batch}; no figures")
    times: list[list[float]] = [[], []]
    for turn in range(TURNS):
        for side, own in zip(both, times, strict=True):
            for i in range(STEPS):
                at = 1 + turn * STEPS + i
                begin = time.perf_counter()
                side.decode(tokens[:, at], CONTEXT + at)
                own.append(time.perf_counter() - begin)
    return times


def run(s: Settings) -> dict:
    """Table of step times and their ratio; keys ``ratio_b{N}``."""
    model, _ = build_model(s)
    both = sides(model)
    rows, result = [], {}
    with progress("bench=decode", len(BATCHES), "batches") as advance:
        for batch in BATCHES:
            slow, fast = measure(both, batch, s.numerics)
            ratio = median(slow) / median(fast)
            low, _, high = quantiles([a / b for a, b in zip(slow, fast, strict=True)], n=4)
            rate = batch / median(fast)
            rows.append([batch, median(slow) * 1e3, median(fast) * 1e3, ratio, low, high, rate])
            result[f"ratio_b{batch}"] = round(ratio, 3)
            result[f"compile_ms_b{batch}"] = round(median(fast) * 1e3, 3)
            advance(1)
    columns = ("batch", "reference ms", "compile ms", "ratio", "p25 of the ratio", "p75", "compile tokens/s")
    report.table("decode", columns, rows)
    return {**result, "numerics": s.numerics, "cache": s.cache, "weights": s.weights, "threads": s.threads}
