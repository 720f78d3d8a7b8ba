"""A scheduler driven without a model: a runner whose cache holds tags instead of keys and values, and a loop around it.

A row's tag is a checksum of every token up to it, so a wrong page, a row that was never written, a ring that was copied
too late or a token that came twice shows as a wrong tag in the step that reads it. A token is a checksum too, of seed
and all tokens before it: what a request must answer can be computed without any scheduler (`answer`).
"""

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from serve.request import Abort, Ask, Finish, Logprobs, Outputs, Sampling
from serve.schedule.pages import chain
from serve.schedule.plan import Drawn, Plan
from serve.schedule.policies import cache_aware, fcfs, priority
from serve.schedule.scheduler import Scheduler
from serve.settings import Limits, Policy, Serve

VOCAB = 50
WRONG = 3  # added to a token, it makes a draft that does not hold
POLICIES = {"fcfs": (fcfs.key, False), "priority": (priority.key, False), "cache_aware": (cache_aware.key, True)}


def scheduler(window_tokens: int = 4, layers: int = 2, context: int = 64, drafts: int = 0, **serve) -> Scheduler:
    """A small one: pages of 4 tokens."""
    key, rekey = POLICIES[serve.pop("policy", "fcfs")]
    key, rekey = serve.pop("key", key), serve.pop("rekey", rekey)
    sizes = {"page_size": 4, "pages": 32, "max_batch": 4, "budget_tokens": 16} | serve
    made = Serve(**sizes, policy=Policy("", rekey))
    return Scheduler(Limits(made, context, window_tokens, layers, drafts), key)


def ask(handle: int, tokens: Iterable[int], page_size: int = 4, priority: int = 0, hashes=None, **sampling) -> Ask:
    ids = np.array(list(tokens), np.int32)
    names = chain(ids, page_size) if hashes is None else hashes
    return Ask(handle, ids, names, Sampling(**({"max_tokens": 4} | sampling)), priority)


def tags(tokens: np.ndarray) -> np.ndarray:
    """Of each token, in the light of those before it; never 0."""
    out, raw = [1], np.ascontiguousarray(tokens, np.int32).tobytes()
    for at in range(0, len(raw), 4):
        out.append(zlib.crc32(raw[at : at + 4], out[-1]) | 1)
    return np.array(out[1:], np.int64)


def draw(sampling: Sampling, tokens: np.ndarray, prompt: int) -> int:
    """The token after ``tokens``."""
    token = zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes(), sampling.seed & 0xFFFF) % VOCAB
    while len(tokens) < prompt + sampling.min_tokens and token in sampling.stop_ids:
        token = (token + 1) % VOCAB
    return token


def answer(request: Ask, most: int) -> tuple[list[int], str]:
    """What the request must get if a sequence may have ``most`` tokens, and why it ends."""
    s, prompt = request.sampling, len(request.tokens)
    tokens = request.tokens
    while len(tokens) < min(prompt + s.max_tokens, most):
        token = draw(s, tokens, prompt)
        if token in s.stop_ids:
            return tokens[prompt:].tolist(), "stop"
        tokens = np.append(tokens, np.int32(token))
    return tokens[prompt:].tolist(), "length"


@dataclass
class Part:
    """What one sequence does in a step, as the table said when the step was launched."""

    slot: int
    sampling: Sampling
    handle: int
    prompt: int
    tokens: np.ndarray  # all that is known, then drafts
    start: int
    pages: np.ndarray
    write_from: int
    floor: int
    kept_from: int
    draws: int  # from the rows at the end of the step
    true: int = 0  # drafts that hold


class Tags:
    """The runner: `launch` reads the table, `collect` runs the step, as a thread might, as late as possible."""

    def __init__(self, s: Scheduler, rng: random.Random):
        self.rng, self.s, self.size = rng, s, s.serve.page_size
        self.ring = s.rule.window + s.limits.drafts
        self.pages = np.zeros((s.serve.pages + 1, self.size), np.int64)
        slots = 1 + s.serve.max_batch + s.serve.retained
        self.rings = np.zeros((3, slots, self.ring), np.int64)  # early layers, late ones, and `_depth` of the early
        self.requests: dict[int, Ask] = {}
        self.rows = 0  # computed so far

    def launch(self, plan: Plan) -> tuple:
        assert len(set(plan.slots.tolist())) == len(plan) > 0, "a slot twice in a step, or an empty step"
        assert plan.tokens <= self.s.serve.budget_tokens
        t = plan.table
        parts = []
        for slot in plan.decode.tolist():
            assert t.computed[slot] == t.total[slot] - 1, "decoding without having caught up"
            most = min(plan.drafts, int(t.limit[slot] - t.total[slot]) - 1)
            parts.append(self._part(plan, slot, int(t.total[slot]) - 1, int(t.total[slot]), self.rng.randint(0, most)))
        for p in plan.prefills:
            slot = p.sequence.slot
            assert t.computed[slot] == p.start and p.start + p.count <= p.sequence.target
            assert p.last == (p.start + p.count == p.sequence.target)
            parts.append(self._part(plan, slot, p.start, p.start + p.count, None, p.last))
        return plan, parts

    def _part(self, plan: Plan, slot: int, start: int, end: int, drafts: int | None, last: bool = True) -> Part:
        t, request = plan.table, self.requests[int(plan.table.handle[slot])]
        prompt, total = len(request.tokens), int(t.total[slot])
        known = np.concatenate((request.tokens, t.generated[slot, : total - prompt]))
        assert drafts is None or t.last[slot] == known[-1]
        part = Part(
            slot=slot,
            sampling=request.sampling,
            handle=request.handle,
            prompt=prompt,
            tokens=known[:end],
            start=start,
            pages=t.pages[slot, : t.capacity[slot] // self.size].copy(),
            write_from=int(t.write_from[slot]),
            floor=int(t.floor[slot]) if drafts is None else 0,
            kept_from=int(t.kept_from[slot]) if drafts is None else 0,
            draws=int(last),
        )
        part.true = self.rng.randint(0, drafts or 0)
        for i in range(drafts or 0):
            token = draw(part.sampling, part.tokens, prompt) + (0 if i < part.true else WRONG)
            part.tokens = np.append(part.tokens, np.int32(token))
        return part

    def collect(self, ticket: tuple) -> Drawn:
        plan, parts = ticket
        for copy in plan.copies:
            self.rings[:, copy.target] = self.rings[:, copy.source]
        tokens = np.full((len(parts), 1 + plan.drafts), 1, np.int64)
        counts = np.zeros(len(parts), np.int64)
        logprobs, prompt_logprobs = {}, {}
        for part in parts:
            self._write(part)
        for i, part in enumerate(parts):
            self._read(part)
            if part.draws:
                counts[i] = part.true + 1
                known = part.tokens[: max(part.start + 1, part.prompt)] if i < len(plan.decode) else part.tokens
                for j in range(part.true + 1):
                    tokens[i, j] = draw(part.sampling, known, part.prompt)
                    known = np.append(known, np.int32(tokens[i, j]))
                if part.sampling.logprobs is not None:
                    logprobs[part.handle] = rows(tokens[i, : counts[i]], part.sampling.logprobs)
        for p in plan.prefills:
            request = p.sequence.ask
            if request.sampling.prompt_logprobs is not None:
                told = request.tokens[max(p.start, p.told) + 1 : p.start + p.count + 1]
                prompt_logprobs |= {request.handle: rows(told, 0)} if len(told) else {}
        return Drawn(tokens, counts, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _write(self, part: Part) -> None:
        end = len(part.tokens)
        assert end <= len(part.pages) * self.size, f"{end} tokens in {len(part.pages)} pages"
        assert (part.pages > 0).all(), "the scratch page in a page table"
        self.rows += end - part.start
        position, value = np.arange(part.start, end), tags(part.tokens)[part.start :]
        own = position >= part.write_from
        self.pages[part.pages[position[own] // self.size], position[own] % self.size] = value[own]
        for at, tagged in zip(position.tolist(), value.tolist()):  # in this order: a stretch may be longer than a ring
            self.rings[: 1 + (at >= part.kept_from), part.slot, at % self.ring] = tagged
            self.rings[2, part.slot, at % self.ring] = depth = self._depth(part, at)
            exact = self.s.rule.mode == "replay" or at < part.write_from or depth == self.s.rule.layers
            assert exact, f"row {at} is written and not exact: {depth} of {self.s.rule.layers} layers"

    def _depth(self, part: Part, position: int) -> int:
        """Layers whose row at a position is as in a prefill without hits: one more than those of all rows it sees."""
        layers, first = self.s.rule.layers, position - self.s.rule.window + 1
        if first > 0 and first < part.floor:
            return 1
        seen = [self.rings[2, part.slot, at % self.ring] for at in range(max(0, first), position)]
        return min(layers, 1 + min(seen, default=layers))

    def _read(self, part: Part) -> None:
        """Every row that the step's rows attend to is there; of the rings, those that the last row sees."""
        end = len(part.tokens)
        want = tags(part.tokens)
        got = self.pages[part.pages].reshape(-1)[:end]
        assert (got == want).all(), f"global rows {np.flatnonzero(got != want)} of {end} are wrong"
        for late in range(2):
            lowest = max(part.floor, part.kept_from if late else 0)
            at = np.arange(max(end - self.s.rule.window, lowest), end)
            got = self.rings[late, part.slot, at % self.ring]
            assert (got == want[at]).all(), f"window rows {at[got != want[at]]} of {end} are wrong"


def rows(tokens: np.ndarray, k: int) -> Logprobs:
    """Made-up log-probabilities that tell whose they are: each row's first value is its token."""
    return Logprobs(
        tokens.astype(np.float32), np.zeros((len(tokens), k), np.int32), np.zeros((len(tokens), k), np.float32)
    )


class Loop:
    """The engine's loop, with and without overlap; collects what requests got and checks the books at every turn.

    ``meddle(moment)`` gives messages that arrive at a moment: "first", "planned" (and not launched), "flying" (the step
    runs; with overlap the next is planned).
    """

    def __init__(self, s: Scheduler, rng: random.Random, overlap: bool = False, meddle: Callable | None = None):
        self.s, self.overlap = s, overlap
        self.runner = Tags(s, rng)
        self.meddle = meddle or (lambda moment: [])
        self.got: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, list[float]] = {}
        self.finished: dict[int, Finish] = {}
        self.steps = 0
        self._next: Plan | None = None

    def add(self, *messages: Ask | Abort) -> None:
        for message in messages:
            if isinstance(message, Ask):
                self.runner.requests[message.handle] = message
                self.got[message.handle] = []
        self.s.add(messages)

    @property
    def idle(self) -> bool:
        return self.s.idle and self._next is None

    def step(self) -> Plan | None:
        """One turn; returns what was launched."""
        s = self.s
        self.steps += 1
        self.add(*self.meddle("first"))
        plan, self._next = self._next or s.plan(), None
        if plan is None:
            self._take(s.flush())
            return None
        self.add(*self.meddle("planned"))
        plan = s.settle(plan)
        ticket = self.runner.launch(plan) if len(plan) else None
        if self.overlap:
            self._next = s.plan()
            s.check()
        self.add(*self.meddle("flying"))
        self._take(s.update(plan, self.runner.collect(ticket) if ticket else Drawn.empty()))
        s.check()
        return plan

    def _take(self, out: Outputs) -> None:
        assert len(out.handles) == len(out.counts) and out.counts.sum() == len(out.tokens)
        assert set(out.logprobs) <= set(out.handles.tolist()), "log-probabilities of tokens that did not come"
        for handle, new, logprobs in out.each():
            assert new and handle not in self.finished, "tokens after the end"
            self.got[handle] += new
            if self.runner.requests[handle].sampling.logprobs is not None:
                assert logprobs.chosen.tolist() == new, "log-probabilities of other tokens"
        for handle, part in out.prompt_logprobs.items():
            assert handle not in self.finished
            self.prompt_logprobs.setdefault(handle, []).extend(part.chosen.tolist())
        for finish in out.finished:
            assert finish.handle not in self.finished, "finished twice"
            self.finished[finish.handle] = finish

    def run(self, most: int = 10_000) -> None:
        """Until nobody is left; raises if that takes more than ``most`` steps."""
        for _ in range(most):
            if self.idle:
                break
            self.step()
        assert self.idle, f"{len(self.s.running)} running and {len(self.s.waiting)} waiting after {most} steps"
        assert self.s.pages.used == 0, f"{self.s.pages.used} pages leaked"
        assert not self.s.table.handle.any() and len(self.s.slots) == self.s.serve.max_batch

    def judge(self, aborted: Iterable[int] = ()) -> None:
        """Every request got what it must, once."""
        s = self.s
        most = min(s.limits.context, s.serve.pages * s.serve.page_size)
        for handle, request in self.runner.requests.items():
            finish = self.finished[handle]
            want, reason = answer(request, most)
            if finish.reason == "error":
                assert finish.message and not self.got[handle]
                continue
            if finish.reason == "abort":
                assert handle in aborted, "aborted and nobody asked for it"
                want = want[: len(self.got[handle])]
            else:
                assert finish.reason == reason, f"{handle} ended by {finish.reason}, not {reason}"
            assert self.got[handle] == want, f"{handle}: {self.got[handle]}, not {want}"
            size = s.serve.page_size
            assert finish.cached_tokens % size == 0 and finish.cached_tokens < max(len(request.tokens), 1)
            asked = request.sampling.prompt_logprobs is not None
            got = self.prompt_logprobs.get(handle, [])
            assert got == request.tokens[1 : 1 + len(got)].tolist(), "rows of the prompt lost or doubled"
            if asked and finish.reason != "abort":
                assert len(got) == len(request.tokens) - 1
