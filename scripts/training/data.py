"""Rows of token ids for training: a function of (seed, step) alone, so a resumed run sees what it would have seen."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TEST_SHARES = 8  # each epoch reads all ordinary code and this part of the test files


@dataclass(frozen=True)
class Tokens:
    """Documents as ids, each beginning with BOS."""

    code: tuple[np.ndarray, ...]
    tests: tuple[np.ndarray, ...]


class Rows:
    """Epochs of shuffled documents cut into rows of ``length + 1``, shuffled; row 0 of a batch starts a document."""

    def __init__(self, tokens: Tokens, seed: int, length: int, rows: int):
        self._tokens, self._seed, self._length, self._rows = tokens, seed, length, rows
        self._epochs: dict[int, np.ndarray] = {}
        self._steps = [len(self._epoch(e)) // rows for e in range(TEST_SHARES)]

    def batch(self, step: int) -> Tensor:
        """ids [rows, length + 1] int64."""
        cycle, left = divmod(step, sum(self._steps))
        share = 0
        while left >= self._steps[share]:
            left -= self._steps[share]
            share += 1
        cut = self._epoch(cycle * TEST_SHARES + share)
        picked = cut[left * self._rows : (left + 1) * self._rows].copy()
        picked[0] = self._document_start(step)
        return torch.from_numpy(picked.astype(np.int64))

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            self._epochs = {epoch: self._cut(epoch)}
        return self._epochs[epoch]

    def _cut(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, epoch, self._length])
        tests = self._tokens.tests[epoch % TEST_SHARES :: TEST_SHARES]
        documents = [*self._tokens.code, *tests]
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        share, wide = epoch % TEST_SHARES, self._length + 1
        first = share * 37 % wide  # epochs cut at other places, but a share always gives the same number of rows
        count = (len(stream) - wide) // wide
        return stream[first : first + count * wide].reshape(count, wide)[rng.permutation(count)]

    def _document_start(self, step: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, 1 << 20, self._length, step])
        wide = self._length + 1
        while True:
            document = self._tokens.code[rng.integers(len(self._tokens.code))]
            if len(document) >= wide:
                return document[:wide]
