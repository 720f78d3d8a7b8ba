"""Sequences side by side in a runner's cache, for those who drive one without a scheduler: each has a slot and pages.

B sequences, M rows wanted of a step, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.pack import Span
from model.transformer import Trim
from serve.runner import Runner

CHUNK_TOKENS = 512  # of one sequence in a step of a prefill


@dataclass(frozen=True)
class Chunk:
    """A step of a prefill. ``wanted``: of each span, its sequence and the positions of the rows whose logits are."""

    spans: list[Span]
    wanted: list[tuple[int, np.ndarray]]

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.spans)

    @property
    def rows(self) -> np.ndarray:
        """Numbers [M] of the wanted rows in the step, sequence by sequence."""
        first = np.cumsum([0, *(len(s.tokens) for s in self.spans)])
        return np.concatenate(
            [at - s.start + n for s, (_, at), n in zip(self.spans, self.wanted, first[:-1], strict=True)]
        )


@dataclass(frozen=True)
class Laid:
    """Sequence i is on slot 1 + i and on ``pages_each`` pages from 1 + i * ``pages_each`` on."""

    runner: Runner
    pages_each: int

    def span(self, i: int, tokens: np.ndarray, start: int, slot: int | None = None, **more: int) -> Span:
        """Tokens of sequence ``i`` from position ``start`` on, maybe by another slot than its own."""
        first = 1 + i * self.pages_each
        return Span(tokens, start, 1 + i if slot is None else slot, range(first, first + self.pages_each), **more)

    def chunks(
        self, sequences: Sequence[np.ndarray], first: Sequence[int], tokens: int | None = None
    ) -> Iterator[Chunk]:
        """The steps that prefill sequences [n] side by side, ``tokens`` of each a step (None: CHUNK_TOKENS); rows of
        sequence i from position ``first[i]`` on are wanted."""
        size = tokens or CHUNK_TOKENS
        for start in range(0, max(map(len, sequences)), size):
            spans, wanted = [], []
            for i, sequence in enumerate(sequences):
                part = sequence[start : start + size]
                if len(part):
                    spans.append(self.span(i, part, start))
                    wanted.append((i, np.arange(max(first[i], start), start + len(part))))
            yield Chunk(spans, wanted)

    def logits(self, chunk: Chunk) -> Tensor:
        """Run a chunk; logits [M, V] of its wanted rows."""
        return self.runner.step(chunk.spans, torch.from_numpy(chunk.rows).to(self.runner.device))[0]

    def prefill(self, sequences: Sequence[np.ndarray], first: Sequence[int], tokens: int | None = None) -> list[Tensor]:
        """Logits [.., V] of the wanted rows of each sequence, all at once: with many, go through ``chunks``."""
        found: list[list[Tensor]] = [[] for _ in sequences]
        for chunk in self.chunks(sequences, first, tokens):
            parts = self.logits(chunk).split([len(at) for _, at in chunk.wanted])
            for (i, _), part in zip(chunk.wanted, parts, strict=True):
                found[i].append(part)
        return [torch.cat(parts) for parts in found]

    def decode(self, tokens: np.ndarray, position: int) -> Tensor:
        """Logits [B, V] after one more token of each sequence, tokens [B], all at ``position``."""
        spans = [self.span(i, tokens[i : i + 1], position) for i in range(len(tokens))]
        return self.runner.step(spans, torch.arange(len(spans), device=self.runner.device))[0]

    def trim(self, sequences: Sequence[np.ndarray], layer: int, whole_windows: bool = False) -> tuple[Trim, Tensor]:
        """For the step that is all of ``sequences`` [n], whole: layers from ``layer`` on run on each one's last window.
        Also the numbers [B] of the sequences' last rows among those kept."""
        counts = np.array([len(s) for s in sequences])
        kept = np.minimum(counts, self.runner.model.cfg.sliding_window)
        starts = (counts - kept).tolist()
        tails = [self.span(i, s[a:], a, floor=a) for i, (s, a) in enumerate(zip(sequences, starts, strict=True))]
        batch = self.runner.pack(tails)
        rows = torch.zeros(len(batch.tokens), dtype=torch.int64)  # beyond the tails: padding
        ends = np.cumsum(counts)
        rows[: kept.sum()] = torch.from_numpy(
            np.concatenate([np.arange(e - k, e) for e, k in zip(ends, kept, strict=True)])
        )
        last = torch.from_numpy(np.cumsum(kept) - 1).to(self.runner.device)
        return Trim(layer, rows.to(self.runner.device), batch, whole_windows), last
