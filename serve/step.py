"""One step on the device: drafts, rows, forward, draws. B sequences that decode, k drafts, R sequences in all, N rows.

Everything of the table that changes is copied when a step is made: it may run on its own thread while the loop goes on.
Nothing of that grows with a sequence: of its pages only the new ones are sent (serve/tables.py).
"""

import numpy as np
import torch
from torch import Tensor

from model.dspark import DraftBatch
from model.pack import Rows
from serve import sample, speculate
from serve.lockstep import Shape
from serve.request import Logprobs
from serve.runner import Runner
from serve.schedule.plan import Drawn, Plan, Prefill
from serve.settings import Serve


class Step:
    """``shape``: what to pad to, so that all ranks' collectives are of one size."""

    def __init__(self, runner: Runner, serve: Serve, plan: Plan, shape: Shape):
        self.runner, self.serve, self.plan, self.shape = runner, serve, plan, shape
        t, d, slots, prefills = plan.table, plan.decode, plan.slots, plan.prefills
        self.decode, self.last, self.total = d, t.last[d], t.total[d]
        self.room = np.minimum(t.limit[d] - self.total - 1, plan.drafts)  # drafts that can still count
        starts = np.array([p.start for p in prefills], np.int64)
        self.counts = np.array([p.count for p in prefills], np.int64)
        self.starts = np.concatenate((self.total - 1, starts))
        ends = np.concatenate((self.total + self.room, starts + self.counts))
        self.reach = int(ends.max(initial=1))
        self.news = runner.table.news(t, slots)
        self.prompts = [p.sequence.tokens(p.start, p.start + p.count, t).astype(np.int64) for p in prefills]
        depth = runner.model.layout.token_depth
        self.history = [p.sequence.tokens(max(0, p.start - depth), p.start, t).astype(np.int64) for p in prefills]
        behind = np.arange(len(slots)) >= len(d)  # those that catch up
        self.floors = np.where(behind, t.floor[slots], 0)
        self.kept_from = np.where(behind, t.kept_from[slots], 0)
        self.write_from = t.write_from[slots]
        self.draft_floors = np.maximum(t.floor[d], t.kept_from[d])
        self.rule = (t.seed[slots], t.temperature[slots], t.top_p[slots], t.top_k[slots])
        self.stops, self.min_total = t.stops[slots], t.min_total[slots]
        self.logprobs = t.logprobs[slots]

    @torch.no_grad()
    def run(self) -> Drawn:
        self._prepare()
        drafts, verify = self._draft()
        rows = self._rows(drafts, verify)
        number, owner, place = self._wanted(rows)
        asked = self._asked(rows)
        logits = self._forward(rows, np.concatenate((number, *asked)))
        tokens = sample.draw(logits[: len(number)], self._rule(owner, place))
        picks = np.zeros((len(self.plan), drafts.shape[1] + 1), np.int64)
        first = np.cumsum(np.bincount(owner, minlength=len(self.plan))) - np.bincount(owner, minlength=len(self.plan))
        picks[owner, np.arange(len(owner)) - first[owner]] = tokens.cpu().numpy()
        counts = self._accept(drafts, verify, picks, owner)
        return Drawn(
            picks,
            counts,
            drafted=int(verify.sum()),
            accepted=int((counts[: len(verify)] - 1).sum()),
            logprobs=self._logprobs(logits, tokens, first, counts),
            prompt_logprobs=self._prompt_logprobs(logits[len(number) :], asked, rows),
        )

    # --- before the step ---

    def _prepare(self) -> None:
        """New pages, copies of rings that are due, and the ids in front of a prefill's start, which Engram's n-grams
        reach to."""
        cache, layout = self.runner.cache, self.runner.model.layout
        self.runner.table.put(self.news)
        for copy in self.plan.copies:
            layout.copy_slot(cache, copy.source, copy.target)
        for p, ids in zip(self.plan.prefills, self.history, strict=True):
            place = torch.arange(p.start - len(ids), p.start) % layout.token_depth
            where = (p.sequence.slot * layout.token_depth + place).to(cache.tokens.device)
            cache.tokens[where] = torch.from_numpy(ids).to(cache.tokens.device)

    def _draft(self) -> tuple[np.ndarray, np.ndarray]:
        """Drafts [B, k], drawn with the noise that will verify them, and how many of each to verify [B]."""
        n, most = len(self.decode), self.plan.drafts
        if not most or not n:
            if self.shape.drafting:
                self.runner.draft_nothing(self.shape.drafting)
            return np.zeros((n, most), np.int64), np.zeros(n, np.int64)
        put = lambda a: torch.from_numpy(np.ascontiguousarray(a)).to(self.runner.device)  # noqa: E731
        seeds, temperature = (put(a[:n, None].repeat(self.runner.block, 1)) for a in self.rule[:2])
        places = put(self.total[:, None] + np.arange(self.runner.block))
        batch = DraftBatch(
            anchors=put(self.last),
            positions=put(self.total - 1),
            slots=put(self.decode),
            floors=put(self.draft_floors),
            inv_temperature=sample.inverse(temperature[:, 0]),
            noise=sample.noise(seeds, places, temperature, self.runner.model.cfg.vocab_size),
        )
        made = self.runner.draft(batch, self.shape.drafting)
        verify = self.room
        if self.serve.speculation.adaptive:
            chances = speculate.survival(made.confidence.cpu().numpy()[:, :most])
            verify = speculate.verified(chances, self.room, n + int(self.counts.sum()), self.serve.speculation.row_cost)
        return made.tokens.cpu().numpy()[:, :most], verify

    # --- the step ---

    def _rows(self, drafts: np.ndarray, verify: np.ndarray) -> Rows:
        taken = np.arange(drafts.shape[1] + 1) <= verify[:, None]
        block = np.concatenate((self.last[:, None], drafts), 1)[taken]
        return Rows(
            tokens=np.concatenate((block.astype(np.int64), *self.prompts)),
            starts=self.starts,
            counts=np.concatenate((verify + 1, self.counts)),
            slots=self.plan.slots,
            write_from=self.write_from,
            floors=self.floors,
        )

    def _wanted(self, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows that draw a token: their numbers [M], whose they are [M], the position of the drawn token [M]."""
        n, first = len(self.decode), np.cumsum(rows.counts) - rows.counts
        owner = np.repeat(np.arange(n), rows.counts[:n])
        number = np.arange(len(owner))
        last = np.array([n + i for i, p in enumerate(self.plan.prefills) if p.last], np.int64)
        number = np.concatenate((number, (first + rows.counts - 1)[last]))
        owner = np.concatenate((owner, last))
        return number, owner, rows.starts[owner] + number - first[owner] + 1

    def _asked(self, rows: Rows) -> list[np.ndarray]:
        """Row numbers of each prefill whose prompt log-probabilities are wanted and not told yet, else empty."""
        first = (np.cumsum(rows.counts) - rows.counts)[len(self.decode) :]
        return [at + np.arange(*asked_stretch(p)) - p.start for p, at in zip(self.plan.prefills, first, strict=True)]

    def _forward(self, rows: Rows, wanted: np.ndarray) -> Tensor:
        """Logits [M, V] of the ``wanted`` rows; late layers run on the rows that are kept, where that is fewer."""
        begin = np.maximum(rows.starts, self.kept_from)
        kept = np.maximum(rows.starts + rows.counts - begin, 0)
        if (kept == rows.counts).all() and self.shape.late == self.shape.rows:
            return self.runner.run(rows, self.reach, wanted, least=self.shape.rows)
        owner = np.repeat(np.arange(len(rows.counts)), rows.counts)
        position = np.arange(len(owner)) - (np.cumsum(rows.counts) - rows.counts)[owner] + rows.starts[owner]
        stays = position >= self.kept_from[owner]
        some = kept > 0
        late = Rows(
            tokens=rows.tokens[stays],
            starts=begin[some],
            counts=kept[some],
            slots=rows.slots[some],
            write_from=rows.write_from[some],
            floors=np.maximum(rows.floors, self.kept_from)[some],
        )
        renumbered = np.cumsum(stays) - 1
        sizes = self.shape.rows, self.shape.late
        return self.runner.run(rows, self.reach, renumbered[wanted], np.flatnonzero(stays), late, *sizes)

    def _rule(self, owner: np.ndarray, place: np.ndarray) -> sample.Rule:
        seeds, temperature, top_p, top_k = (a[owner] for a in self.rule)
        banned = np.where((place < self.min_total[owner])[:, None], self.stops[owner], -1)
        return sample.Rule(seeds, place, temperature, top_p, top_k, banned)

    def _accept(self, drafts: np.ndarray, verify: np.ndarray, picks: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """Tokens [R] that each sequence gains; where acceptance is forced, ``picks`` become the drafts."""
        n, counts = len(self.decode), np.zeros(len(self.plan), np.int64)
        counts[owner] = 1
        if not drafts.shape[1]:
            return counts
        mean = self.serve.speculation.force_acceptance
        if mean is None:
            held = speculate.accepted(drafts, picks[:n], verify)
        else:
            held = speculate.forced(self.rule[0][:n], self.total, verify, mean)
            forced = np.arange(drafts.shape[1]) < held[:, None]
            picks[:n, :-1] = np.where(forced, drafts, picks[:n, :-1])
        counts[:n] += held
        return counts

    # --- log-probabilities ---

    def _logprobs(self, logits: Tensor, tokens: Tensor, first: np.ndarray, counts: np.ndarray) -> dict[int, Logprobs]:
        out = {}
        for i in np.flatnonzero((self.logprobs >= 0) & (counts > 0)).tolist():
            rows = slice(first[i], first[i] + counts[i])
            told = sample.logprobs(logits[rows], tokens[rows], int(self.logprobs[i]))
            out[int(self.plan.handles[i])] = Logprobs(*told)
        return out

    def _prompt_logprobs(self, logits: Tensor, asked: list[np.ndarray], rows: Rows) -> dict[int, Logprobs]:
        out, at = {}, 0
        for p, numbers in zip(self.plan.prefills, asked, strict=True):
            if not len(numbers):
                continue
            begin, end = asked_stretch(p)
            following = torch.from_numpy(p.sequence.ask.tokens[begin + 1 : end + 1].astype(np.int64))
            mine = logits[at : at + len(numbers)]
            told = sample.logprobs(mine, following.to(mine.device), p.sequence.ask.sampling.prompt_logprobs)
            out[p.sequence.handle] = Logprobs(*told)
            at += len(numbers)
        return out


def asked_stretch(p: Prefill) -> tuple[int, int]:
    """Positions of a prefill's rows that predict a prompt token whose log-probability is wanted and not told yet."""
    end = min(p.start + p.count, len(p.sequence.ask.tokens) - 1)
    wanted = p.sequence.ask.sampling.prompt_logprobs is not None
    return (max(p.start, p.told), end) if wanted and end > max(p.start, p.told) else (p.start, p.start)
