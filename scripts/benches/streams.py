"""Synthetic routing: choices of each expert, interval by interval, with a given balancedness before any balancing.

I intervals, L layers, E experts. A stream is a popularity [L, E] that may change from one interval to the next, raised
to a power: the power is found at which E / ranks experts a rank, in order, have the balancedness asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from parallel.eplb import metric

TOPICS = 12  # of the correlated stream


@dataclass(frozen=True)
class Size:
    layers: int
    experts: int
    ranks: int
    choices: int  # a layer and interval, over all ranks


def zipf(rng: np.random.Generator, size: Size, intervals: int) -> np.ndarray:
    """log popularity [I, L, E]: 1 / rank, in a random order, always the same."""
    ranked = -np.log(np.arange(1, size.experts + 1))
    one = np.stack([rng.permutation(ranked) for _ in range(size.layers)])
    return np.repeat(one[None], intervals, 0)


def drifting(rng: np.random.Generator, size: Size, intervals: int) -> np.ndarray:
    """A Zipf stream whose log popularities wander, without becoming flatter: after the run they have correlation 0.9
    with those at its start."""
    a, b = zipf(rng, size, 1)[0], zipf(rng, size, 1)[0]
    angle = np.linspace(0, np.arccos(0.9), intervals)[:, None, None]
    mean = a.mean()
    return mean + np.cos(angle) * (a - mean) + np.sin(angle) * (b - mean)


def correlated(rng: np.random.Generator, size: Size, intervals: int) -> np.ndarray:
    """Experts belong to topics, neighbours to the same one; each interval has its own mixture of topics."""
    topic = np.arange(size.experts) * TOPICS // size.experts
    base = zipf(rng, size, 1)
    return base + rng.normal(0, 0.3, (intervals, 1, TOPICS))[:, :, topic]


def few_hot(rng: np.random.Generator, size: Size, intervals: int) -> np.ndarray:
    """Eight experts a layer take most, the others little and evenly."""
    one = rng.normal(0, 0.1, (size.layers, size.experts))
    for row in one:
        row[rng.choice(size.experts, 8, replace=False)] += 4
    return np.repeat(one[None], intervals, 0)


def bursts(rng: np.random.Generator, size: Size, intervals: int) -> np.ndarray:
    """A Zipf stream in which a few other experts are hot for one interval each: not to be foreseen."""
    out = zipf(rng, size, intervals)
    for interval in out:
        for row in interval:
            row[rng.choice(size.experts, 4, replace=False)] += 0.7
    return out


def even(rng: np.random.Generator, size: Size, intervals: int) -> np.ndarray:
    return np.zeros((intervals, size.layers, size.experts))


STREAMS: dict[str, Callable] = {
    "zipf": zipf, "drifting": drifting, "correlated": correlated, "few hot": few_hot, "bursts": bursts, "even": even,
}  # fmt: skip


def make(name: str, size: Size, intervals: int, wanted: float, seed: int = 0) -> np.ndarray:
    """Choices int64 [I, L, E] of a stream with balancedness ``wanted`` over all of it (an even one has what it has)."""
    rng = np.random.default_rng(seed)
    popularity = STREAMS[name](rng, size, intervals)
    low, high = 0.0, 8.0
    for _ in range(30):
        power = (low + high) / 2
        low, high = (power, high) if _before(_chances(popularity, power), size) > wanted else (low, power)
    return rng.multinomial(size.choices, _chances(popularity, (low + high) / 2))


def _chances(popularity: np.ndarray, power: float) -> np.ndarray:
    p = np.exp(power * (popularity - popularity.max(-1, keepdims=True)))
    return p / p.sum(-1, keepdims=True)


def _before(chances: np.ndarray, size: Size) -> float:
    return metric.balancedness(metric.rank_loads(chances.mean(0), size.ranks))
