"""Placement of experts on streams of routing: fitted on earlier steps, judged on later ones.

Target: 40 layers of 384 experts, drafter: 3 of 128, both over 32 ranks, with streams as uneven as those published (0.35
and 0.21). With `benches.eplb.trace=routing.npz` (of `scripts.evaluate eval=routing`) the streams are that trace's.
Balance is that of parallel/eplb/metric.py: the mean over later intervals. Redundant slots are printed.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from parallel.eplb import metric, policy
from parallel.eplb.policy import Slots
from parallel.eplb.window import ROWS, recent
from scripts import report
from scripts.benches import streams
from scripts.benches.sizes import EplbSizes
from scripts.benches.streams import Size
from scripts.build import Settings
from scripts.evaluation import trace
from scripts.progress import progress

RANKS, INTERVALS = 32, 16  # half of them to fit on
CHOICES = 400_000  # a layer and interval: 100 steps of 21 rows a rank, 6 choices each
PARTS = {"target": (Size(40, 384, RANKS, CHOICES), 0.35, 32), "drafter": (Size(3, 128, RANKS, CHOICES), 0.21, 32)}
TRACE_TOKENS = 500
PLANS = 20
COLUMNS = ("part", "stream", "redundant", "before", "after", "followed")


@dataclass(frozen=True)
class Judged:
    """One stream: balance of later intervals with experts in order, with the plan kept (``after``), and with a plan
    made anew before each interval (``followed``)."""

    before: float
    after: float
    followed: float
    loads: tuple[np.ndarray, np.ndarray]  # [I, L, R] of later intervals, experts in order and planned


def judge(choices: np.ndarray, slots: Slots) -> Judged:
    """``choices`` [I, L, E]: the first half is fitted on."""
    half, ranks = len(choices) // 2, slots.ranks
    later, plain = choices[half:], np.tile(np.arange(slots.experts), (choices.shape[1], 1))
    seen = choices[half - 1 :: -1]
    plan = policy.plan(recent(seen), slots, rows=seen)
    before = metric.rank_loads(metric.slot_loads(later, plain), ranks)
    after = metric.rank_loads(metric.slot_loads(later, plan), ranks)
    followed, now = [], plan
    for i, interval in enumerate(later, half):
        seen = choices[i - 1 : i - 1 - half if i > half else None : -1]
        load = recent(seen)
        new = policy.plan(load, slots, now, seen)
        now = np.where(policy.worthwhile(load, now, new, ranks, 0.02)[:, None], new, now)
        followed.append(metric.rank_loads(metric.slot_loads(interval, now), ranks))
    mean = lambda loads: float(np.mean([metric.balancedness(t) for t in loads]))  # noqa: E731
    return Judged(mean(before), mean(after), mean(followed), (before, after))


def plan_seconds(size: Size, slots: Slots, wanted: float) -> tuple[list[float], list[float]]:
    """Seconds of PLANS plans: by the clock, and of this thread on a core."""
    rows = streams.make("zipf", size, ROWS, wanted)
    load = rows.sum(0)
    old, wall, core = policy.plan(np.ones(load.shape), slots), [], []
    for _ in range(PLANS):
        begin, began = time.perf_counter(), time.thread_time()
        policy.plan(load, slots, old, rows)
        wall.append(time.perf_counter() - begin)
        core.append(time.thread_time() - began)
    return wall, core


def heatmap(name: str, judged: Judged) -> None:
    """Load of ranks over time in the most uneven layer, and by layer, before and after, as shares of the mean."""
    most = judged.loads[0].sum(0)
    worst = int((most.max(-1) / np.maximum(most.mean(-1), 1e-9)).argmax())
    with report.plot(f"load_{name}", 4) as axes:
        for i, (when, loads) in enumerate(zip(("in order", "planned"), judged.loads, strict=True)):
            share = loads / np.maximum(loads.mean(-1, keepdims=True), 1e-9)
            over_time = axes[i], share[:, worst], f"interval (layer {worst})"
            for ax, values, what in (over_time, (axes[2 + i], share.mean(0), "layer")):
                ax.imshow(values, aspect="auto", vmin=0, vmax=3, cmap="magma", interpolation="nearest")
                ax.set(title=f"{when}: load / mean", xlabel="rank", ylabel=what)


def traced(path: Path, sizes: EplbSizes, advance) -> dict:
    """The parts of a trace, cut into 2 to INTERVALS intervals of about as many tokens, TRACE_TOKENS at least."""
    routing, out = trace.load(path), {}
    for name, part in (("target", routing.target), ("drafter", routing.drafter)):
        if part is None:
            continue
        tokens = int(part.offsets[-1])
        if part.steps < 4 or tokens < 4:
            raise ValueError(
                f"benches.eplb.trace={path}: {name} has {part.steps} steps of {tokens} tokens; 4 are needed"
            )
        count = min(max(tokens // TRACE_TOKENS, 2), INTERVALS)
        cuts = np.unique(np.searchsorted(part.offsets[:-1], np.arange(count) * tokens // count))
        choices = np.add.reduceat(part.step_counts(), cuts, 0)
        most = part.experts * (sizes.ranks - 1)  # a replica on every rank
        for redundant in dict.fromkeys(min(n, most) for n in sizes.redundant):
            judged = judge(choices, Slots(part.experts, sizes.ranks, redundant)), redundant
            out.setdefault(name, {})[f"trace, {redundant}"] = judged
        advance(1)
    return out


def synthetic(advance) -> dict:
    out = {}
    for name, (size, wanted, redundant) in PARTS.items():
        out[name] = {}
        for stream in streams.STREAMS:
            choices = streams.make(stream, size, INTERVALS, wanted)
            out[name][stream] = judge(choices, Slots(size.experts, size.ranks, redundant)), redundant
            advance(1)
    return out


def run(s: Settings) -> dict:
    """Keys ``{part}_before``, ``_after``, ``_gap_{form}`` of the first stream, ``plan_ms``; all streams in a table."""
    sizes = s.benches.eplb
    given = sizes.trace
    with progress("bench=eplb", 2 if given else 2 * len(streams.STREAMS), "streams") as advance:
        parts = traced(Path(given), sizes, advance) if given else synthetic(advance)
    rows, out = [], {}
    for part, judged in parts.items():
        for stream, (j, redundant) in judged.items():
            gaps = metric.recovered(j.before, j.after)
            rows.append([part, stream, redundant, j.before, j.after, j.followed, *gaps.values()])
        first, redundant = next(iter(judged.values()))
        out |= {f"{part}_before": round(first.before, 4), f"{part}_after": round(first.after, 4)}
        out |= {f"{part}_gap_{f}": round(v, 4) for f, v in metric.recovered(first.before, first.after).items()}
        out |= {f"{part}_{f}": round(v, 4) for f, v in metric.per_layer(first.loads[1].sum(0)).items()}
        out |= {f"{part}_redundant": redundant}
        heatmap(part, first)
    size, wanted, redundant = PARTS["target"]
    wall, core = plan_seconds(size, Slots(size.experts, size.ranks, redundant), wanted)
    report.table("balance", [*COLUMNS, *metric.recovered(0.5, 1)], rows)
    out |= {"plan_ms": round(min(wall) * 1e3, 2), "plan_ms_median": round(median(wall) * 1e3, 2)}
    return {**out, "plan_core_ms": round(median(core) * 1e3, 2), "plan_layers": size.layers, "plan_ranks": size.ranks}
