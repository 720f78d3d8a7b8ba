"""Prompts of meaningless tokens, exact in length and in what they share. V usable ids, b tokens a block.

A block's tokens are a function of (seed, session, block id) alone: equal ids give equal tokens. Different ids give
different tokens as long as ids are below V (b = 1) or V^2 (b >= 2); beyond that two blocks may collide, two pages of
blocks do not in practice. Ids stand for all that came before, so exactness is needed among siblings only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BUST_TOKENS = 6  # of the mark that makes a play's prompts its own; its first ones count plays, so no two are equal
BLOCKS, TAILS, BUSTS = 0, 1, 2  # streams of chance


@dataclass(frozen=True)
class Scale:
    """How much smaller than recorded a trace is played: ``width`` tokens for each block of ``block``, and times as
    ``time`` says. Shared blocks, and so hit rates, stay what they are."""

    block: int
    width: int
    time: float = 1.0

    def prompt(self, tokens: int) -> int:
        return tokens // self.block * self.width + tokens % self.block * self.width // self.block

    def output(self, tokens: int) -> int:
        return max(1, -(-tokens * self.width // self.block))


class Filler:
    """The tokens of one namespace: ``name`` is that of a session, or of a whole trace whose ids are global."""

    def __init__(self, seed: int, name: str, vocab: np.ndarray, width: int):
        self.vocab, self.width = vocab, width  # vocab [V] int32: ids that are no special tokens
        self._key = (seed, *name.encode())
        self._tables: dict[int, np.ndarray] = {}

    def prompt(self, ids: np.ndarray, tokens: int, label: int) -> np.ndarray:
        """int32 [tokens]: the blocks' tokens, cut or carried on with tokens that only ``label`` has."""
        body = self.blocks(ids)[:tokens]
        return np.concatenate([body, self.tail(tokens - len(body), label)])

    def blocks(self, ids: np.ndarray) -> np.ndarray:
        """int32 [n * b] of block ids [n]."""
        ids, size = np.asarray(ids, np.int64), len(self.vocab)
        out = np.empty((len(ids), self.width), np.int32)
        if self.width == 1:
            for epoch in np.unique(ids // size).tolist():
                rows = ids // size == epoch
                out[rows, 0] = self._table(epoch)[ids[rows] % size]
            return out.reshape(-1)
        out[:, 0] = self._table(0)[ids % size]
        out[:, 1] = self._table(1)[(ids // size + ids) % size]
        for j in range(2, self.width):
            out[:, j] = self._table(2 + j % 2)[(ids * (2 * j + 1) + j) % size]
        return out.reshape(-1)

    def tail(self, tokens: int, label: int) -> np.ndarray:
        """int32 [tokens] of what has no block id."""
        if tokens <= 0:
            return np.zeros(0, np.int32)
        rng = np.random.default_rng([TAILS, label, *self._key])
        return self.vocab[rng.integers(0, len(self.vocab), tokens)]

    def _table(self, number: int) -> np.ndarray:
        """A shuffled vocabulary [V]."""
        if number not in self._tables:
            self._tables[number] = np.random.default_rng([BLOCKS, number, *self._key]).permutation(self.vocab)
        return self._tables[number]


def bust(seed: int, play: int, vocab: np.ndarray) -> np.ndarray:
    """int32 [BUST_TOKENS]: the mark of play number ``play``, unlike that of any other."""
    out = vocab[np.random.default_rng([BUSTS, seed, play]).integers(0, len(vocab), BUST_TOKENS)]
    for i in range(3):
        out[i] = vocab[play % len(vocab)]
        play //= len(vocab)
    return out


def marked(prompt: np.ndarray, mark: np.ndarray, at: int) -> np.ndarray:
    """``prompt`` with ``mark`` put in behind its first ``at`` tokens: where the first user turn begins."""
    return np.concatenate([prompt[:at], mark, prompt[at:]])


def vocabulary(size: int, special: Sequence[int] = ()) -> np.ndarray:
    """int32 ids below ``size`` that are not ``special``. Raises ValueError if fewer than two are left."""
    keep = np.ones(size, bool)
    keep[np.asarray(special, np.int64)] = False
    if keep.sum() < 2:
        raise ValueError(f"filler needs a vocabulary of two or more ordinary tokens, this one has {keep.sum()}")
    return np.flatnonzero(keep).astype(np.int32)
