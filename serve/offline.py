"""The plain loop: prefill a group of prompts, then decode them together until all are done, drafted or not.

No scheduler, no sharing, no paging beyond a fixed range of pages each: what the engine is measured against.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from model.dspark import DraftBatch
from model.pack import Span, last_rows
from serve import sample
from serve.request import Sampling
from serve.runner import Runner

CHUNK_TOKENS = 512  # most tokens of a prefill step


@dataclass
class Completion:
    """``steps`` counts decode steps after the prefill, which itself gives the first token."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    finish: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the target made of a block of drafts: it kept the first ``kept``. ``confidence``: the drafter's logit that
    each draft is kept if all before it are."""

    index: int
    drafts: list[int]
    confidence: list[float]
    kept: int


@dataclass
class Running:
    """One prompt on its way: the tokens known so far, of which ``computed`` are in the cache."""

    index: int
    tokens: list[int]
    prompt: int
    sampling: Sampling
    slot: int
    pages: range
    done: Completion
    computed: int = 0

    def span(self, upto: int, drafts: Sequence[int] = ()) -> Span:
        """The step that computes tokens up to ``upto``, then ``drafts`` to be verified."""
        new = [*self.tokens[self.computed : upto], *drafts]
        return Span(np.array(new, np.int64), self.computed, self.slot, self.pages)


def generate(
    runner: Runner,
    prompts: Sequence[np.ndarray],
    sampling: Sequence[Sampling],
    speculate: bool = False,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    on_verdict: Callable[[Verdict], None] | None = None,
) -> list[Completion]:
    """Complete each prompt [n] int64; ``on_tokens(index, new ids)`` is called as tokens come, ``on_verdict`` for each
    block of drafts.

    Raises ValueError, before anything runs, for a prompt that is empty, too long or holds an unknown id, and for
    ``speculate`` without a drafter.
    """
    if speculate and not runner.block:
        raise ValueError("speculate=true needs a drafter; this model has none (num_nextn_predict_layers is 0)")
    for prompt in prompts:
        runner.check(prompt)
    done = [Completion() for _ in prompts]
    waiting = list(range(len(prompts)))
    while waiting:
        group = _admit(runner, waiting, prompts, sampling, done)
        _prefill(runner, group, on_tokens)
        active = [s for s in group if not s.done.finish]
        while active:
            _decode(runner, active, speculate, on_tokens, on_verdict)
            active = [s for s in active if not s.done.finish]
    return done


def _admit(
    runner: Runner,
    waiting: list[int],
    prompts: Sequence[np.ndarray],
    sampling: Sequence[Sampling],
    done: list[Completion],
) -> list[Running]:
    """Take prompts off ``waiting`` while slots and pages last; each gets its pages for good."""
    size, group, page = runner.model.layout.page_size, [], 1
    while waiting and len(group) < runner.slots - 1:
        i = waiting[0]
        limit = min(len(prompts[i]) + sampling[i].max_tokens, runner.context)
        need = min(-(-(limit + runner.block) // size), runner.pages - 1)
        if page + need > runner.pages:
            break
        pages = range(page, page + need)
        group.append(Running(i, prompts[i].tolist(), len(prompts[i]), sampling[i], len(group) + 1, pages, done[i]))
        page += need
        waiting.pop(0)
    return group


def _prefill(runner: Runner, group: list[Running], on_tokens: Callable | None) -> None:
    """Fill the cache chunk by chunk, several prompts a step where they fit, and draw each first token."""
    pending = list(group)
    while pending:
        budget, chosen = CHUNK_TOKENS, []
        for s in pending:
            n = min(budget, s.prompt - s.computed)
            if n == 0:
                break
            chosen.append((s, s.computed + n))
            budget -= n
        spans = [s.span(upto) for s, upto in chosen]
        logits, _ = runner.step(spans, last_rows(spans))
        for s, upto in chosen:
            s.computed = upto
        ready = [i for i, (s, _) in enumerate(chosen) if s.computed == s.prompt]
        first = [chosen[i][0] for i in ready]
        for s, picks in zip(first, _draw(logits[ready], first, [1] * len(first)), strict=True):
            _accept(runner, s, picks, on_tokens)
        pending = [s for s in pending if s.computed < s.prompt]


def _decode(
    runner: Runner, active: list[Running], speculate: bool, on_tokens: Callable | None, on_verdict: Callable | None
) -> None:
    """One step of every active sequence: its newest token, and the drafts to verify after it."""
    drafts, sure = _draft(runner, active) if speculate else ([[] for _ in active], [[] for _ in active])
    room = [runner.context - len(s.tokens) for s in active]
    drafts = [d[:r] for d, r in zip(drafts, room, strict=True)]
    spans = [s.span(len(s.tokens), d) for s, d in zip(active, drafts, strict=True)]
    counts = [len(d) + 1 for d in drafts]
    logits, _ = runner.step(spans, torch.arange(sum(counts)))
    for s, draft, c, picks in zip(active, drafts, sure, _draw(logits, active, counts), strict=True):
        kept = next((i for i, token in enumerate(draft) if token != picks[i]), len(draft))
        s.computed = len(s.tokens) + kept
        s.done.steps += 1
        if draft and on_verdict is not None:
            on_verdict(Verdict(s.index, draft, c[: len(draft)], kept))
        _accept(runner, s, picks[: kept + 1], on_tokens)


def _draft(runner: Runner, active: list[Running]) -> tuple[list[list[int]], list[list[float]]]:
    """A block of drafts for each sequence, drawn with the noise that will verify them, and the drafter's confidence."""
    seeds, temperature = _settings(active)
    positions = torch.tensor([len(s.tokens) - 1 for s in active])
    places = positions.unsqueeze(-1) + 1 + torch.arange(runner.block)
    wide = [t.unsqueeze(-1).expand_as(places) for t in (seeds, temperature)]
    noise = sample.noise(wide[0], places, wide[1], runner.model.cfg.vocab_size)
    slots = torch.tensor([s.slot for s in active])
    batch = DraftBatch(
        anchors=torch.tensor([s.tokens[-1] for s in active]),
        positions=positions,
        slots=slots,
        floors=torch.zeros_like(slots),
        inv_temperature=sample.inverse(temperature),
        noise=noise,
    )
    made = runner.draft(batch)
    return made.tokens.tolist(), made.confidence.tolist()


def _draw(logits: Tensor, active: list[Running], counts: list[int]) -> list[list[int]]:
    """The target's tokens: row i of a sequence, of logits [sum(counts), V], draws the i-th after those it knows."""
    if not active:
        return []
    owner = np.repeat(np.arange(len(active)), counts)
    places = np.concatenate([len(s.tokens) + np.arange(n) for s, n in zip(active, counts, strict=True)])
    picks = sample.draw(logits, _rule(active, owner, places, logits.shape[-1])).tolist()
    return [picks[a:b] for a, b in pairwise(np.cumsum([0, *counts]))]


def _rule(active: list[Running], owner: np.ndarray, places: np.ndarray, vocab: int) -> sample.Rule:
    """How rows [M] draw: row i the token at ``places[i]`` of sequence ``owner[i]``. Stop ids may not come early."""
    every = [s.sampling for s in active]
    seeds = np.array([h.seed for h in every], np.int64)
    temperature, top_p = (np.array([getattr(h, n) for h in every], np.float32) for n in ("temperature", "top_p"))
    top_k = np.array([h.top_k for h in every], np.int64)
    width = max(len(h.stop_ids) for h in every)
    stops = np.array([[*h.stop_ids, *[-1] * (width - len(h.stop_ids))] for h in every], np.int64)
    stops[stops >= vocab] = -1
    early = places < np.array([s.prompt + s.sampling.min_tokens for s in active])[owner]
    banned = np.where(early[:, None], stops[owner], -1)
    return sample.Rule(seeds[owner], places, temperature[owner], top_p[owner], top_k[owner], banned)


def _settings(active: list[Running]) -> tuple[Tensor, Tensor]:
    """Seed int64 and temperature fp32 of each sequence."""
    seeds = torch.tensor([s.sampling.seed for s in active], dtype=torch.int64)
    return seeds, torch.tensor([s.sampling.temperature for s in active], dtype=torch.float32)


def _accept(runner: Runner, s: Running, picks: list[int], on_tokens: Callable | None) -> None:
    """Append the target's tokens, up to a stop id, the limit of the request or the end of the context."""
    new: list[int] = []
    for token in picks:
        if token in s.sampling.stop_ids:
            s.done.finish = "stop"
            break
        new.append(token)
        s.tokens.append(token)
        s.done.tokens.append(token)
        if len(s.done.tokens) >= s.sampling.max_tokens or len(s.tokens) >= runner.context:
            s.done.finish = "length"
            break
    if new and on_tokens is not None:
        on_tokens(s.index, new)
