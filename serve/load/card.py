"""The report card of a run: one flat dict of figures, from the records of its requests.

What counts: requests that are no warm-up. Rates go over first start to last end, and are per GPU (or engine) where
their name says so. A token's latency (ITL) is its share of the gap that its step closed, so tokens that came together
have the same; interactivity at p is 1 / ITL at p. Definitions as InferenceX has them (utils/agentic/aggregation).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from serve.load.client import StepSeen
from serve.load.drive import Record

POINTS = (50, 90, 99)
MAX_FAILED, MAX_OVERFLOW, MIN_COVERAGE, MIN_DURATION_S = 0.10, 0.01, 0.95, 900.0


@dataclass(frozen=True)
class Context:
    """What the records do not say. ``price_per_hour`` is that of a GPU, in any currency; ``left_out`` of
    ``known`` requests of the trace do not fit and are never played; ``skipped_s`` are the cuts of idle time by cap."""

    gpus: int = 1
    price_per_hour: float | None = None
    kv_bytes_per_token: float | None = None
    left_out: int = 0
    known: int = 0
    skipped_s: dict[str, float] = field(default_factory=dict)
    steps: Sequence[StepSeen] = ()


def card(records: Sequence[Record], context: Context) -> dict[str, float | int | bool | None]:
    """Figures by name; None where there is nothing to measure."""
    counted = [r for r in records if not r.warmup]
    done = [r for r in counted if r.ok]
    out = totals(counted, done, context)
    out |= latencies(done)
    out |= cache(done)
    out |= engine(done, context)
    return out | validity(counted, done, context, out["duration_s"])


def totals(counted: Sequence[Record], done: Sequence[Record], context: Context) -> dict:
    """Counts, throughput and what it costs."""
    ends = [r.end_s for r in counted if r.end_s is not None]
    seconds = max(ends) - min(r.sent_s for r in counted) if ends else 0.0
    prompt, output = sum(r.usage.prompt_tokens for r in done), sum(r.usage.output_tokens for r in done)
    uncached = prompt - sum(r.usage.cached_tokens for r in done)
    rate = lambda n: n / seconds / context.gpus if seconds else None  # noqa: E731
    cost = lambda n: context.price_per_hour / (rate(n) * 3600 / 1e6) if n and seconds else None  # noqa: E731
    priced = context.price_per_hour is not None
    return {
        "requests": len(counted),
        "completed": len(done),
        "failed_requests": sum(r.failed for r in counted),
        "cut_requests": sum(r.usage is None for r in counted),
        "duration_s": seconds,
        "gpus": context.gpus,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "total_tok_per_s": rate(prompt + output),
        "uncached_tok_per_s": rate(uncached),
        "output_tok_per_s": rate(output),
        "requests_per_s": len(done) / seconds if seconds else None,
        **in_flight(counted),
        "cost_per_m_total": cost(prompt + output) if priced else None,
        "cost_per_m_output": cost(output) if priced else None,
    }


def in_flight(counted: Sequence[Record]) -> dict:
    """Requests under way: over time on average, and at most."""
    times, level = flight(counted)
    if len(times) < 2 or times[-1] == times[0]:
        return {"in_flight_mean": None, "in_flight_max": None}
    mean = float((level[:-1] * np.diff(times)).sum() / (times[-1] - times[0]))
    return {"in_flight_mean": mean, "in_flight_max": int(level.max())}


def flight(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Times [n] at which the number of requests in flight changes, and that number from then on [n]."""
    spans = [(r.sent_s, r.end_s) for r in records if r.end_s is not None]
    if not spans:
        return np.zeros(0), np.zeros(0, np.int64)
    sent, ended = np.array(spans).T
    times, places = np.unique(np.concatenate([sent, ended]), return_inverse=True)
    change = np.bincount(places[: len(sent)], minlength=len(times))
    change = change - np.bincount(places[len(sent) :], minlength=len(times))
    return times, np.cumsum(change)


# --- latency ---


def ttft(record: Record) -> float:
    return record.arrivals[0][0] - record.sent_s


def tpot(record: Record) -> float | None:
    """Seconds a token after the first, over the request; None for a single token."""
    more = record.usage.output_tokens - 1
    return (record.arrivals[-1][0] - record.arrivals[0][0]) / more if more > 0 else None


def gaps(records: Sequence[Record]) -> np.ndarray:
    """Seconds to each token after a request's first stretch, all requests together. Where a server does not tell how
    many tokens came in a stretch, all stretches count as equally long."""
    parts = [np.zeros(0)]
    for record in records:
        times, counts = np.array(record.arrivals).T
        if counts.sum() != record.usage.output_tokens and len(counts) > 1:
            counts[1:] = (record.usage.output_tokens - counts[0]) / (len(counts) - 1)
        parts.append(np.repeat(np.diff(times) / counts[1:], np.rint(counts[1:]).astype(np.int64)))
    return np.concatenate(parts)


def latencies(done: Sequence[Record]) -> dict:
    """Milliseconds at each of POINTS, and interactivity in tokens per second."""
    came = [r for r in done if r.arrivals]
    itl = gaps(came)
    samples = {
        "ttft": [ttft(r) for r in came],
        "itl": itl,
        "tpot": [t for t in map(tpot, came) if t is not None],
        "e2e": [r.end_s - r.sent_s for r in came],
    }
    out = {}
    for name, values in samples.items():
        values = np.asarray(values)
        out[f"{name}_ms_mean"] = float(values.mean() * 1e3) if len(values) else None
        for p in POINTS:
            out[f"{name}_ms_p{p}"] = float(np.percentile(values, p) * 1e3) if len(values) else None
    for p in POINTS:
        slow = out[f"itl_ms_p{p}"]
        out[f"interactivity_p{p}"] = 1e3 / slow if slow else None
    return out


# --- cache, engine, validity ---


def cache(done: Sequence[Record]) -> dict:
    """Shares of the prompt tokens: what an endless cache would hold, what the engine found; replay apart."""
    prompt = sum(r.usage.prompt_tokens for r in done)
    share = lambda n: n / prompt if prompt else None  # noqa: E731
    replayed = sum(r.usage.replayed_tokens for r in done)
    return {
        "hit_theoretical": share(sum(r.reachable_tokens for r in done)),
        "hit_achieved": share(sum(r.usage.cached_tokens for r in done)),
        "replayed_tokens": replayed,
        "replayed_share": share(replayed),
    }


def engine(done: Sequence[Record], context: Context) -> dict:
    """Tokens that a decode step gave a request (the first comes from the prefill), and what the engine tells of its
    steps: how many, and the mean of each part that it counts the seconds of."""
    came = [r for r in done if r.arrivals]
    later, decoded = sum(r.usage.output_tokens - r.arrivals[0][1] for r in came), sum(len(r.arrivals) - 1 for r in came)
    out = {
        "acceptance_length": later / decoded if decoded else None,
        "kv_bytes_per_token": context.kv_bytes_per_token,
        **step_split(context.steps),
    }
    for name in ("system", "tree", "gap"):
        out[f"idle_capped_{name}_s"] = context.skipped_s.get(name, 0.0)
    return out


def step_split(steps: Sequence[StepSeen]) -> dict:
    """From the counters ``steps_total`` and ``PART_seconds_total``; nothing where the engine does not tell."""
    told = [s.stats for s in steps if "steps_total" in s.stats]
    count = told[-1]["steps_total"] - told[0]["steps_total"] if told else 0
    if not count:
        return {}
    out = {"steps": count}
    for name, end in told[-1].items():
        if name.endswith("_seconds_total"):
            part = name.removesuffix("_seconds_total")
            out[f"step_{part}_ms"] = (end - told[0].get(name, 0.0)) / count * 1e3
    return out


def validity(counted: Sequence[Record], done: Sequence[Record], context: Context, duration_s: float) -> dict:
    """The rules of AgentX: few failures, few requests left out, figures for nearly all, long enough."""
    ended = [r for r in counted if r.usage is not None]
    measured = sum(bool(r.arrivals) for r in done)
    share = lambda n, of: n / of if of else 0.0  # noqa: E731
    flags = {
        "valid_failed": share(len(ended) - len(done), len(ended)) <= MAX_FAILED,
        "valid_overflow": share(context.left_out, context.known) <= MAX_OVERFLOW,
        "valid_coverage": bool(done) and share(measured, len(done)) >= MIN_COVERAGE,
        "valid_duration": duration_s >= MIN_DURATION_S,
    }
    return flags | {"left_out_requests": context.left_out, "submission_valid": all(flags.values())}
