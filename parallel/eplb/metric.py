"""How even the load of ranks is. T [L, R]: choices (token, expert) that rank r executed at MoE layer l in an interval.

A layer takes as long as its slowest rank, so B = sum_l mean_r T / sum_l max_r T, in 1/R .. 1: a ratio of sums, reduced
over ranks first (vllm #51813; over layers first, [[100, 200], [100, 200]] would pass for even). Padding, and the shared
expert, are not in T; a layer without load has no say.
"""

import math

import numpy as np


def rank_loads(slots: np.ndarray, ranks: int) -> np.ndarray:
    """T [.., L, R] of loads by physical slot [.., L, P], as many slots a rank, rank by rank."""
    return slots.reshape(*slots.shape[:-1], ranks, -1).sum(-1)


def slot_loads(load: np.ndarray, plan: np.ndarray) -> np.ndarray:
    """Loads [.., L, P] of slots under a plan [L, P]: an expert's load [.., L, E] in equal parts to its replicas."""
    each = load / np.maximum(counts(plan, load.shape[-1]), 1)
    return np.take_along_axis(each, np.broadcast_to(plan, (*load.shape[:-1], plan.shape[-1])), -1)


def counts(plan: np.ndarray, experts: int) -> np.ndarray:
    """Replicas [L, E] of each expert in a plan [L, P]."""
    layers = len(plan)
    flat = plan + np.arange(layers)[:, None] * experts
    return np.bincount(flat.ravel(), minlength=layers * experts).reshape(layers, experts)


def balancedness(t: np.ndarray) -> float:
    """B of T [L, R]; 1 where there is no load at all."""
    most = t.max(-1).sum()
    return float(t.mean(-1).sum() / most) if most > 0 else 1.0


def per_layer(t: np.ndarray) -> dict[str, float]:
    """min, p10, median and mean over layers of mean_r / max_r, layers without load left out."""
    most = t.max(-1)
    b = t.mean(-1)[most > 0] / most[most > 0]
    if not len(b):
        b = np.ones(1)
    named = {"min": b.min(), "p10": np.percentile(b, 10), "median": np.median(b), "mean": b.mean()}
    return {name: float(value) for name, value in named.items()}


def recovered(before: float, after: float) -> dict[str, float]:
    """The share of the gap to B = 1 that was recovered, in three forms: ``linear`` in B, in ``log`` B, and in time in
    ``excess`` of an even load's (1 / B - 1). All 1 where there was no gap."""
    if before >= 1:
        return {"linear": 1.0, "log": 1.0, "excess": 1.0}
    return {
        "linear": (after - before) / (1 - before),
        "log": 1 - math.log(after) / math.log(before),
        "excess": 1 - (1 / after - 1) / (1 / before - 1),
    }
