"""Workloads from distributions: arrivals, lengths, AgentX-like sessions.

Chance comes from the caller's Generator. The sessions' figures are fitted to the quantiles of the first 200 sessions of
kv-cache-tester's traces (Claude Code traffic, the corpus AgentX began from); all lengths in tokens, blocks of 64.
"""

from dataclasses import dataclass

import numpy as np

from serve.load.records import Arrival, Session, Subagent, Turn, runs_of

BLOCK = 64


def arrivals(rng: np.random.Generator, count: int, rate: float, shape: float = 1.0) -> np.ndarray:
    """Times [count] of a renewal process of ``rate`` a second with gamma gaps: shape 1 is Poisson, below it bursty."""
    if rate <= 0 or shape <= 0:
        raise ValueError(f"arrivals need a rate and a shape above 0, got rate {rate} and shape {shape}")
    return np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))


def lengths(rng: np.random.Generator, count: int, median: float, sigma: float, most: int) -> np.ndarray:
    """Log-normal token counts [count] int64 between 1 and ``most``."""
    return np.clip(np.rint(median * np.exp(sigma * rng.standard_normal(count))), 1, most).astype(np.int64)


# --- sessions ---


@dataclass(frozen=True)
class SessionShape:
    """Medians, log-normal spreads and shares; a pair is (median, sigma)."""

    turns: tuple[float, float] = (37, 1.15)
    head: tuple[float, float] = (17_000, 0.12)  # tools and system prompt
    fresh: tuple[float, float] = (2_000, 1.0)  # rest of the first prompt of a new conversation
    resumed: float = 0.45  # share of sessions that begin with an old conversation
    old: tuple[float, float] = (105_000, 0.85)  # its length
    growth: tuple[float, float] = (700, 1.05)  # new tokens of a turn
    tail: tuple[float, float, float] = (0.07, 2_600, 1.15)  # share, scale and index of the Pareto tail of new tokens
    most_growth: int = 40_000
    compact: int = 165_000  # context at which a conversation is shortened
    roomy: float = 0.12  # share of sessions that never are
    output: tuple[float, float] = (205, 0.75)
    long_output: tuple[float, float, float] = (0.16, 900, 0.8)  # share, median, sigma
    tool: tuple[float, float] = (6.5, 0.4)  # seconds from the end of a call to the next, when a tool ran
    human: tuple[float, float, float] = (0.45, 50, 1.8)  # share, median, sigma, when a person was asked
    call: tuple[float, float] = (7, 0.65)  # seconds of a call
    reset: float = 0.003  # share of turns that begin with a shortened context
    rewrite: float = 0.035  # share of turns of which an earlier part changed
    subagents: float = 0.04  # share of sessions that have any
    most_context: int = 900_000


def sessions(rng: np.random.Generator, count: int, shape: SessionShape = SessionShape()) -> list[Session]:
    return [Writer(rng, shape, f"synthetic_{i:04}").session() for i in range(count)]


class Writer:
    """Writes one session; ids are given out in order of first appearance, as in the recorded traces."""

    def __init__(self, rng: np.random.Generator, shape: SessionShape, name: str):
        self.rng, self.shape, self.name, self.next_id = rng, shape, name, 1
        self.limit = shape.compact

    def draw(self, median: float, sigma: float) -> float:
        return median * float(np.exp(sigma * self.rng.standard_normal()))

    def session(self) -> Session:
        s, rng = self.shape, self.rng
        head = round(self.draw(*s.head))
        first = round(self.draw(*(s.old if rng.random() < s.resumed else s.fresh)))
        self.limit = s.most_context if rng.random() < s.roomy or head + first > s.compact else s.compact
        agents = int(rng.integers(1, 6)) if rng.random() < s.subagents else 0
        count = max(1, round(self.draw(*s.turns)))
        return Session(self.name, BLOCK, head, self.events(head + first, count, head, agents))

    def events(self, first: int, count: int, head: int, agents: int = 0) -> tuple[Turn | Subagent, ...]:
        """A conversation of ``count`` requests, with subagents after some of them."""
        at, joined, out, spawns = 0.0, 0.0, [], self.rng.integers(0, count, agents).tolist()
        tokens, ids = min(first, self.shape.most_context), np.zeros(0, np.int64)
        for i in range(count):
            think = max(self.think(), joined - at) if i else 0.0
            at += think
            if i:
                tokens, ids = self.grow(tokens, ids, head)
            ids = self.extend(ids, tokens)
            made, call = self.output(), round(self.draw(*self.shape.call), 2)
            out.append(Turn(round(at, 2), tokens, made, runs_of(ids), call, round(think, 2)))
            at += call
            for n in range(spawns.count(i)):
                inner = self.events(round(self.draw(11_000, 0.2)), int(self.rng.integers(2, 9)), 9_000)
                background = self.rng.random() < 0.1
                out.append(Subagent(round(at + n, 2), f"agent_{len(out):03}", background, 9_000, inner))
                joined = joined if background else max(joined, at + n + inner[-1].end_s)
        return tuple(out)

    def grow(self, tokens: int, ids: np.ndarray, head: int) -> tuple[int, np.ndarray]:
        """The next prompt's length, and the ids that it keeps."""
        s, rng, kept = self.shape, self.rng, tokens // BLOCK
        chance = rng.random()
        if chance < s.reset or tokens > self.limit:
            tokens, kept = max(head, int(tokens * rng.uniform(0.1, 0.5))), head // BLOCK
        elif chance < s.reset + s.rewrite:
            kept = int(kept * rng.random())
        share, scale, index = s.tail
        new = scale * (1 - rng.random()) ** (-1 / index) if rng.random() < share else self.draw(*s.growth)
        return min(tokens + 1 + round(min(new, s.most_growth)), s.most_context), ids[:kept]

    def extend(self, ids: np.ndarray, tokens: int) -> np.ndarray:
        """``ids`` up to the full blocks of ``tokens``, with new ones."""
        need = max(0, tokens // BLOCK - len(ids))
        new = np.arange(self.next_id, self.next_id + need)
        self.next_id += need
        return np.concatenate([ids, new])[: tokens // BLOCK]

    def output(self) -> int:
        share, median, sigma = self.shape.long_output
        drawn = self.draw(median, sigma) if self.rng.random() < share else self.draw(*self.shape.output)
        return max(1, round(drawn))

    def think(self) -> float:
        share, median, sigma = self.shape.human
        return self.draw(median, sigma) if self.rng.random() < share else self.draw(*self.shape.tool)


def flat(
    rng: np.random.Generator, count: int, rate: float, shape: float, prompt: tuple, output: tuple
) -> list[Arrival]:
    """Requests that share nothing; ``prompt`` and ``output`` are (median, sigma, most) of their lengths."""
    times = arrivals(rng, count, rate, shape).tolist()
    sizes = zip(lengths(rng, count, *prompt).tolist(), lengths(rng, count, *output).tolist())
    return [Arrival(at, n, m) for at, (n, m) in zip(times, sizes)]


def sharing(rng: np.random.Generator, count: int, rate: float, groups: int, block: int = 512) -> list[Arrival]:
    """Requests that share their beginning with others of one of ``groups``, ids global, as in a Mooncake trace."""
    out, next_id = [], groups * 8
    for at in arrivals(rng, count, rate).tolist():
        tokens, group = int(rng.integers(1, 20 * block)), int(rng.integers(groups))
        need, shared = -(-tokens // block), int(rng.integers(0, 9))
        common = np.arange(group * 8, group * 8 + min(need, shared))
        ids = np.concatenate([common, np.arange(next_id, next_id + need - len(common))])
        next_id += need - len(common)
        out.append(Arrival(round(at, 3), tokens, int(rng.integers(1, 400)), runs_of(ids), block))
    return out
