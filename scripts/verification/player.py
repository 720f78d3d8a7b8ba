"""Plays a set of sequences through a runner: prefill in chunks, decode, drafts, replay, company."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.batch import Batch
from model.cache import Cache
from model.dspark import Draft, DraftBatch
from model.transformer import Model
from scripts import memory
from scripts.laid import Laid
from scripts.verification.case import SequenceSet
from serve.runner import Runner, compiled

MARGIN = 16  # tokens of room beyond prompt and decode steps


class Player:
    """A runner sized for the largest set of a case, with room for two more sequences as company."""

    def __init__(self, model: Model, sets: Sequence[SequenceSet]):
        longest = max(s.prompt.shape[1] + s.decode.shape[1] for s in sets) + MARGIN + model.cfg.dspark_block_size
        pages_each = -(-longest // model.layout.page_size)
        most = max(len(s.prompt) for s in sets) + 2
        self.recordable = not compiled(model)
        pages, slots = 1 + most * pages_each, 1 + most
        memory.require(memory.cache_bytes(model.layout, pages, slots, model.rt.dtype), torch.device("cpu"))
        self.runner = Runner(model, pages, slots)
        self.laid = Laid(self.runner, pages_each)

    def start(self, st: SequenceSet) -> tuple[Cache, Batch]:
        """The cache, and the whole prefill of a set as one batch."""
        spans = [self.laid.span(i, row, 0) for i, row in enumerate(st.prompt)]
        return self.runner.cache, self.runner.pack(spans)

    def prefill(self, tokens: np.ndarray, chunk: int) -> Tensor:
        """Logits [B, S, V] of tokens [B, S], in steps of ``chunk`` tokens a sequence."""
        return torch.stack(self.laid.prefill(tokens, [0] * len(tokens), chunk))

    def decode(self, tokens: np.ndarray, position: int) -> Tensor:
        """Logits [B, V] after one token each, tokens [B]."""
        return self.laid.decode(tokens, position)

    def among_others(self, tokens: np.ndarray, chunk: int) -> Tensor:
        """As `prefill`, each step shared with two other sequences that start elsewhere and move at other speeds."""
        b, total = tokens.shape
        rng = np.random.default_rng(0)
        other = rng.integers(0, self.runner.model.cfg.vocab_size, (2, 3 * total + MARGIN))
        out, done = [], [0, 0]
        for at in range(0, total, chunk):
            mine = [self.laid.span(i, row[at : at + chunk], at) for i, row in enumerate(tokens)]
            company = []
            for j, step in enumerate((1, 5)):
                if done[j] + step <= self.laid.pages_each * self.runner.model.layout.page_size:
                    company.append(self.laid.span(b + j, other[j, done[j] : done[j] + step], done[j]))
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
        trim, last = self.laid.trim(tokens, layer)
        return self.runner.step([self.laid.span(i, row, 0) for i, row in enumerate(tokens)], last, trim)[0]
