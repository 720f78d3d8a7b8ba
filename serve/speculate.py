"""How many drafts to verify, and how many of them held. Host arrays: B sequences, k drafts. See serve/sample.py for why
verified output equals undrafted output token for token."""

import numpy as np

_MIX = np.uint64(0x9E3779B97F4A7C15)


def accepted(drafts: np.ndarray, picks: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Leading drafts [B, k] that equal the target's picks [B, k + 1], of the ``counts`` [B] verified: [B]."""
    same = (drafts == picks[:, :-1]) & (np.arange(drafts.shape[1]) < counts[:, None])
    return np.cumprod(same, 1).sum(1)


def forced(seeds: np.ndarray, positions: np.ndarray, counts: np.ndarray, mean: float) -> np.ndarray:
    """Accept so many of the ``counts`` [B] verified that steps give ``mean`` tokens on average, right or wrong: the
    whole part always, one more by a coin that depends on (seed, position)."""
    want = mean - 1
    with np.errstate(over="ignore"):
        word = (seeds.astype(np.uint64) + _MIX) * _MIX ^ (positions.astype(np.uint64) + np.uint64(1)) * _MIX
        word = (word ^ (word >> np.uint64(29))) * _MIX
    coin = (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.minimum(int(want) + (coin < want - int(want)), counts)


def survival(confidence: np.ndarray) -> np.ndarray:
    """Chance [B, k] that a draft and all before it hold, from the confidence head's raw outputs [B, k]."""
    return np.cumprod(1 / (1 + np.exp(-confidence.astype(np.float64))), 1)


def verified(chances: np.ndarray, room: np.ndarray, rows: int, row_cost: float) -> np.ndarray:
    """Drafts to verify of each sequence [B], at most ``room`` [B]: those of ``chances`` [B, k] that give most tokens
    for a step's cost, which is 1 and ``row_cost`` for each row (adaptive verification, vLLM's DSpark post 2026-08-14).

    Chances fall along a block, so the best n overall are always prefixes. ``rows`` are there without any draft.
    """
    k = chances.shape[1]
    chances = np.where(np.arange(k) < room[:, None], chances, 0.0)
    order = np.sort(chances.ravel())[::-1]
    tokens = len(chances) + np.concatenate(([0.0], np.cumsum(order)))
    rate = tokens / (1 + row_cost * (rows + np.arange(len(tokens))))
    best = int(rate.argmax())
    if best == 0:
        return np.zeros(len(chances), np.int64)
    least = order[best - 1]
    take = (chances >= least) & (chances > 0)
    return take.sum(1)
