"""What a run leaves to be read and looked at: the printed report card, a row per request, plots."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from scripts import report
from serve.load import card
from serve.load.client import StepSeen
from serve.load.drive import Record

WINDOWS = 24  # stretches of time that throughput and interactivity are compared over
LATENCIES = ("ttft", "itl", "tpot", "e2e")


def print_card(figures: dict[str, Any]) -> None:
    """Two tables: latencies by percentile, then everything else."""
    points = [f"p{p}" for p in card.POINTS]
    rows = [[f"{n} (ms)", *(figures[f"{n}_ms_{at}"] for at in ("mean", *points))] for n in LATENCIES]
    rows.append(["interactivity (tokens/s)", None, *(figures[f"interactivity_{at}"] for at in points)])
    report.table("latency", ["", "mean", *points], rows)
    shown = [n for n in figures if not n.startswith((*(f"{n}_ms_" for n in LATENCIES), "interactivity_"))]
    report.table("card", ["figure", "value"], [[n, figures[n]] for n in shown])


def write_rows(path: Path, records: Sequence[Record], begin_s: float) -> None:
    """A JSON line for each request, times in seconds from the run's beginning."""
    with open(path, "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(row(record, begin_s)) + "\n")


def row(r: Record, begin_s: float) -> dict[str, Any]:
    out = {
        "number": r.number, "lane": r.lane, "session": r.session, "turn": r.turn, "warmup": r.warmup,
        "sent_s": r.sent_s - begin_s, "prompt_tokens": r.prompt_tokens, "max_tokens": r.max_tokens,
        "reachable_tokens": r.reachable_tokens, "finish": "cut",
    }  # fmt: skip
    if r.usage is not None:
        u = r.usage
        out |= {"finish": u.finish, "e2e_s": r.end_s - r.sent_s, "output_tokens": u.output_tokens,
                "cached_tokens": u.cached_tokens, "replayed_tokens": u.replayed_tokens}  # fmt: skip
        out |= {"message": u.message} if u.message else {}
    if r.ok and r.arrivals:
        out |= {"ttft_s": card.ttft(r), "tpot_s": card.tpot(r)}
    return out


# --- plots ---


def plots(records: Sequence[Record], steps: Sequence[StepSeen], begin_s: float) -> None:
    """latency.png, timeline.png and interactivity.png, of what counts."""
    done = [r for r in records if r.ok and r.arrivals and not r.warmup]
    if not done:
        return
    latency(done)
    timeline(records, steps, begin_s)
    interactivity(done, begin_s)


def latency(done: Sequence[Record]) -> None:
    """Cumulative distributions."""
    samples = {
        "TTFT": np.array([card.ttft(r) for r in done]),
        "ITL": card.gaps(done),
        "E2E": np.array([r.end_s - r.sent_s for r in done]),
    }
    with report.plot("latency", len(samples)) as axes:
        for ax, (name, values) in zip(axes, samples.items()):
            values = np.sort(values) * 1e3
            ax.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post")
            ax.set(xlabel=f"{name} (ms)", ylabel="share of " + ("tokens" if name == "ITL" else "requests"), ylim=(0, 1))
            if len(values) and values[0] > 0:
                ax.set_xscale("log")
            ax.grid(alpha=0.3)


def timeline(records: Sequence[Record], steps: Sequence[StepSeen], begin_s: float) -> None:
    """Requests in flight over time, and, where an engine tells, how long its steps took."""
    took = durations(steps)
    with report.plot("timeline", 2 if len(took) else 1) as axes:
        times, level = card.flight(records)
        axes[0].step(times - begin_s, level, where="post")
        axes[0].axvline(0, color="grey", linewidth=0.8)
        axes[0].set(ylabel="requests in flight", ylim=(0, None))
        axes[0].yaxis.get_major_locator().set_params(integer=True)
        if len(took):
            at, seconds, held = took.T
            dots = axes[1].scatter(at - begin_s, seconds * 1e3, c=held, s=5)
            axes[1].figure.colorbar(dots, ax=axes[1], label="requests that got tokens")
            axes[1].set(ylabel="ms of a step", yscale="log")
        for ax in axes:
            ax.set_xlabel("seconds since the warm-up")
            ax.grid(alpha=0.3)


def durations(steps: Sequence[StepSeen]) -> np.ndarray:
    """[n, 3] time, seconds of a step and requests that got tokens; steps that gave none count with the next."""
    rows = []
    for before, after in pairwise([s for s in steps if "steps_total" in s.stats]):
        count = after.stats["steps_total"] - before.stats["steps_total"]
        parts = [n for n in after.stats if n.endswith("_seconds_total")]
        if count:
            seconds = sum(after.stats[n] - before.stats.get(n, 0.0) for n in parts) / count
            rows += [(after.at_s, seconds, after.requests)] if seconds > 0 else []
    return np.array(rows).reshape(-1, 3)


def interactivity(done: Sequence[Record], begin_s: float) -> None:
    """Throughput against interactivity, a dot for each stretch of time: 1 / median ITL of its tokens."""
    rows = []
    for r in done:
        times, counts = np.array(r.arrivals).T
        rows.append(np.stack([times[1:], counts[1:], np.diff(times) / counts[1:]], axis=1))
    at, counts, itl = np.concatenate(rows).T
    if not len(at):
        return
    edges = np.linspace(at.min(), at.max() + 1e-9, WINDOWS + 1)
    which = np.digitize(at, edges) - 1
    seconds, points = edges[1] - edges[0], []
    for i in range(WINDOWS):
        mine = which == i
        if counts[mine].sum() >= 2:
            middle = np.median(np.repeat(itl[mine], counts[mine].astype(np.int64)))
            points.append((1 / max(middle, 1e-9), counts[mine].sum() / seconds, edges[i] - begin_s))
    with report.plot("interactivity") as (ax,):
        if points:
            x, y, when = zip(*points)
            ax.figure.colorbar(ax.scatter(x, y, c=when), ax=ax, label="seconds since the warm-up")
        ax.set(xlabel="interactivity (tokens/s of one user)", ylabel="output tokens/s of all", xlim=(0, None))
        ax.set_ylim(0, None)
        ax.grid(alpha=0.3)
