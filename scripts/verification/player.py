"""Plays a set of sequences through a runner: prefill in chunks, decode, drafts, replay, company."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.batch import Batch
from model.cache import Cache
from model.dspark import Draft, DraftBatch
from model.pack import Span
from model.transformer import Model, Trim
from scripts import memory
from scripts.verification.case import SequenceSet
from serve.runner import Runner, compiled

MARGIN = 16  # tokens of room beyond prompt and decode steps


class Player:
    """A runner sized for the largest set of a case, with room for two more sequences as company."""

    def __init__(self, model: Model, sets: Sequence[SequenceSet]):
        longest = max(s.prompt.shape[1] + s.decode.shape[1] for s in sets) + MARGIN + model.cfg.dspark_block_size
        self.per_sequence = -(-longest // model.layout.page_size)
        most = max(len(s.prompt) for s in sets) + 2
        self.recordable = not compiled(model)
        pages, slots = 1 + most * self.per_sequence, 1 + most
        memory.require(memory.cache_bytes(model.layout, pages, slots, model.rt.dtype), torch.device("cpu"))
        self.runner = Runner(model, pages, slots)

    def span(self, tokens: np.ndarray, start: int, i: int, floor: int = 0) -> Span:
        """Tokens of sequence ``i`` of the set."""
        first = 1 + i * self.per_sequence
        return Span(tokens, start, 1 + i, range(first, first + self.per_sequence), floor=floor)

    def start(self, st: SequenceSet) -> tuple[Cache, Batch]:
        """The cache, and the whole prefill of a set as one batch."""
        spans = [self.span(row, 0, i) for i, row in enumerate(st.prompt)]
        return self.runner.cache, self.runner.pack(spans)

    def prefill(self, tokens: np.ndarray, chunk: int) -> Tensor:
        """Logits [B, S, V] of tokens [B, S], in steps of ``chunk`` tokens a sequence."""
        out = []
        for at in range(0, tokens.shape[1], chunk):
            spans = [self.span(row[at : at + chunk], at, i) for i, row in enumerate(tokens)]
            n = len(spans[0].tokens)
            logits, _ = self.runner.step(spans, torch.arange(len(spans) * n))
            out.append(logits.view(len(spans), n, -1))
        return torch.cat(out, 1)

    def decode(self, tokens: np.ndarray, position: int) -> Tensor:
        """Logits [B, V] after one token each, tokens [B]."""
        spans = [self.span(tokens[i : i + 1], position, i) for i in range(len(tokens))]
        return self.runner.step(spans, torch.arange(len(spans)))[0]

    def among_others(self, tokens: np.ndarray, chunk: int) -> Tensor:
        """As `prefill`, each step shared with two other sequences that start elsewhere and move at other speeds."""
        b, total = tokens.shape
        rng = np.random.default_rng(0)
        other = rng.integers(0, self.runner.model.cfg.vocab_size, (2, 3 * total + MARGIN))
        out, done = [], [0, 0]
        for at in range(0, total, chunk):
            mine = [self.span(row[at : at + chunk], at, i) for i, row in enumerate(tokens)]
            company = []
            for j, step in enumerate((1, 5)):
                if done[j] + step <= self.per_sequence * self.runner.model.layout.page_size:
                    company.append(self.span(other[j, done[j] : done[j] + step], done[j], b + j))
                    done[j] += step
            spans = company[:1] + mine + company[1:]
            first = sum(len(s.tokens) for s in company[:1])
            n = len(mine[0].tokens)
            logits, _ = self.runner.step(spans, first + torch.arange(b * n))
            out.append(logits.view(b, n, -1))
        return torch.cat(out, 1)

    def draft(self, anchors: Tensor, position: int) -> Draft:
        """Greedy drafts after ``anchors`` [B] at ``position``."""
        b, cfg = len(anchors), self.runner.model.cfg
        noise = torch.zeros(b, cfg.dspark_block_size, cfg.vocab_size)
        where = torch.full((b,), position, dtype=torch.int64)
        slots = torch.arange(1, b + 1)
        return self.runner.draft(
            DraftBatch(anchors.long(), where, slots, torch.zeros_like(slots), torch.ones(b), noise)
        )

    def replay(self, tokens: np.ndarray, layer: int) -> Tensor:
        """Prefill whose layers from ``layer`` on run on each prompt's last W rows; logits [B, V] of the last token."""
        b, total = tokens.shape
        w = self.runner.model.cfg.sliding_window
        spans = [self.span(row, 0, i) for i, row in enumerate(tokens)]
        tail = [self.span(row[-w:], total - w, i, floor=total - w) for i, row in enumerate(tokens)]
        kept = self.runner.pack(tail)
        rows = torch.zeros(kept.tokens.shape[0], dtype=torch.int64)
        rows[: b * w] = (torch.arange(b).unsqueeze(-1) * total + torch.arange(total - w, total)).flatten()
        last = torch.arange(1, b + 1) * w - 1
        return self.runner.step(spans, last, Trim(layer, rows, kept))[0]
