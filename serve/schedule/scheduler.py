"""The scheduler: who takes part in the next step. Plain Python and numpy, no torch, no clock.

One rule: a sequence has ``total`` tokens of which ``computed`` are in the cache, and a step lets the second catch up.
Prefill (whole or in chunks), decode, drafts, prefix hits and preemption are all that rule. Decoding sequences are
arrays (serve/schedule/table.py), so that a step's work hardly grows with the batch and not at all with prompts.
"""

from collections.abc import Callable, Iterable

import numpy as np

from serve.request import Abort, Ask, Finish, Logprobs, Outputs
from serve.schedule.pages import Pages
from serve.schedule.plan import Copy, Drawn, Plan, Prefill
from serve.schedule.queue import Queue
from serve.schedule.sequence import Sequence
from serve.schedule.settings import Limits
from serve.schedule.table import NEVER, Table
from serve.schedule.windows import Resume, Tails, WindowRule

NAMED_TOGETHER = 8  # pages of generated tokens that are named together: a name costs less in company


class Scheduler:
    """``key(sequence, cached)`` is the policy (serve/schedule/policies). Slots 1 to ``max_batch`` are sequences, those
    above hold retained windows."""

    def __init__(self, limits: Limits, key: Callable):
        serve = limits.serve
        self.limits, self.serve = limits, serve
        self.rule = WindowRule(serve.window, limits.window, limits.layers)
        self.pages = Pages(serve.pages + 1, serve.page_size)
        self.table = Table(serve.max_batch, limits.context, serve.page_size, limits.drafts)
        first = serve.max_batch + 1
        self.tails = Tails(range(first, first + (serve.retained if serve.window == "retain" else 0)))
        self.rank = lambda s: key(s, lambda: self._find(s)[0].cached)
        self.waiting = Queue(self.rank, serve.policy.rekey, serve.max_wait_steps)
        self.running: dict[int, Sequence] = {}  # by slot
        self.step = 0
        self.counts = dict.fromkeys(("asked", "hit_tokens", "replayed_tokens", "prompt_tokens", "preempted"), 0)
        self._prefilling: list[Sequence] = []
        self._slots = list(range(serve.max_batch, 0, -1))
        self._promised = 0  # pages that running prefills are still to take
        self._decoding = np.zeros(0, np.int64)
        self._in_flight = 0  # steps settled and not yet updated
        self._arrivals = 0
        self._copies: list[Copy] = []
        self._ended: list[Finish] = []

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting and not self._ended

    # --- coming and going ---

    def add(self, messages: Iterable[Ask | Abort]) -> None:
        """Take in requests and aborts; what can never run is refused at once."""
        for message in messages:
            if isinstance(message, Abort):
                self._abort(message.handle)
                continue
            self.counts["asked"] += 1
            refusal = self._refusal(message)
            if refusal:
                self._ended.append(Finish(message.handle, "error", message=refusal))
                continue
            self._arrivals += 1
            sequence = Sequence(message, self._arrivals, self.step, names=message.hashes)
            self.waiting.push(sequence)

    def _refusal(self, ask: Ask) -> str:
        n, most = len(ask.tokens), self.serve.pages * self.serve.page_size
        if n == 0:
            return "the prompt is empty: give at least one token"
        if n >= self.limits.context:
            return f"the prompt has {n} tokens, the context is {self.limits.context}: shorten it"
        if n + 1 > most:
            return f"the prompt has {n} tokens, serve.pages hold {most}: it can never fit"
        if len(self.waiting) >= self.serve.max_waiting:
            return f"{len(self.waiting)} requests wait already (serve.max_waiting): try later"
        return ""

    def _abort(self, handle: int) -> None:
        sequence = self.waiting.get(handle)
        if sequence is not None:
            self.waiting.remove(sequence)
        else:
            sequence = next((s for s in self.running.values() if s.handle == handle), None)
            if sequence is None:
                return
            self._leave(sequence)
        self._finish(sequence, "abort")

    def _finish(self, sequence: Sequence, reason: str, message: str = "") -> None:
        self._ended.append(Finish(sequence.handle, reason, sequence.cached, sequence.replayed, message))

    def _leave(self, sequence: Sequence) -> None:
        """Give back slot and pages."""
        t, slot = self.table, sequence.slot
        if t.name_at[slot] < NEVER:
            self._name(slot, int(t.computed[slot]) // t.page_size)
        self.pages.release(t.held(slot))
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self._promised -= self._missing(sequence)
        else:
            self._decoding = self._decoding[self._decoding != slot]
        t.clear(slot)
        del self.running[slot]
        self._slots.append(slot)
        sequence.slot = 0

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the line; what it has generated stays, what it has computed is found again if pages last."""
        t, slot = self.table, sequence.slot
        sequence.output = t.generated[slot, : t.total[slot] - t.prompt[slot]].copy()
        self._leave(sequence)
        sequence.names, sequence.own = sequence.names + sequence.own, []
        sequence.epoch += 1
        self.counts["preempted"] += 1
        self.waiting.push(sequence)

    # --- planning ---

    def plan(self) -> Plan | None:
        """The next step, or None if nobody can take part. Pages are taken here."""
        self.step += 1
        preempted = self.counts["preempted"]
        rows, drafts = self._decode()
        budget = self.serve.budget_tokens - len(rows) * (1 + drafts)
        prefills = []
        for sequence in list(self._prefilling):
            budget -= self._stretch(sequence, budget, prefills)
        while budget > 0 and self._slots and self.counts["preempted"] == preempted:
            sequence = self._admit()
            if sequence is None:
                break
            budget -= self._stretch(sequence, budget, prefills)
        if self.counts["preempted"] > preempted:  # a prefill may have pushed out another, or a decode row
            prefills = [p for p in prefills if p.sequence.slot]
            rows = rows[self.table.handle[rows] > 0]
        if not len(rows) and not prefills:
            return None
        return Plan(self.table, rows, drafts, prefills)

    def _decode(self) -> tuple[np.ndarray, int]:
        """Slots that decode, and how many drafts each may verify; a share of the budget is left to prompts in need."""
        rows = self._decoding
        if not len(rows):
            return rows, 0
        spare = self.serve.budget_tokens - len(rows)
        if self._prefilling or self.waiting:
            spare -= min(max(1, self.serve.budget_tokens // 4), spare)
        drafts = min(self.limits.drafts, spare // len(rows))
        ahead = (1 + self.limits.drafts) * (1 + self._in_flight) - 1
        t = self.table
        short = (t.total[rows] + ahead > t.capacity[rows]).nonzero()[0]
        if not len(short):
            return rows, drafts
        slots = rows[short]
        reach = np.minimum(t.total[slots] + ahead, t.limit[slots])
        have = t.capacity[slots] // t.page_size
        need = -(-reach // t.page_size) - have
        taken = self.pages.take(sum(need.tolist()))
        if taken is not None:
            t.give(slots, have, need, taken)
            return rows, drafts
        yielded = []
        for slot, tokens in zip(slots.tolist(), reach.tolist(), strict=True):
            sequence = self.running.get(slot)
            if sequence is not None and not self._grow(sequence, tokens):
                yielded.append(slot)
        rows = rows[t.handle[rows] > 0]
        return rows[~np.isin(rows, yielded)] if yielded else rows, drafts

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Pages up to ``tokens``, taken from the worst-ranked if none are free; False if it is the worst itself."""
        t, slot, size = self.table, sequence.slot, self.serve.page_size
        have = t.capacity[slot] // size
        need = -(-tokens // size) - have
        if need <= 0:
            return True
        while (taken := self.pages.take(need)) is None:
            victim = max(self.running.values(), key=self._standing)
            if victim is sequence:
                return False
            self._preempt(victim)
        t.pages[slot, have : have + need] = taken
        t.capacity[slot] += need * size
        return True

    def _standing(self, sequence: Sequence) -> tuple:
        """Who is preempted last: those that waited long, then by policy, then by arrival."""
        return (sequence.rank, sequence.order)

    def _missing(self, sequence: Sequence) -> int:
        """Pages that its prefill is still to take."""
        size = self.serve.page_size
        return max(0, -(-sequence.target // size) - int(self.table.capacity[sequence.slot]) // size)

    def _stretch(self, sequence: Sequence, budget: int, prefills: list[Prefill]) -> int:
        """Append the next stretch of a prefill that fits budget and pages; returns its tokens."""
        left = sequence.target - sequence.planned
        count = min(left, budget, self.serve.long_prefill_tokens)
        if self.rule.mode == "retain":
            edge = (sequence.target - 1) // self.serve.page_size * self.serve.page_size
            if sequence.planned < edge < sequence.planned + count:
                count = edge - sequence.planned  # so that the rings can be kept at the end of the last full page
        if count <= 0 or not sequence.slot:
            return 0
        missing = self._missing(sequence)
        if not self._grow(sequence, sequence.planned + count):
            return 0
        self._promised -= missing - self._missing(sequence)
        last = count == left
        prefills.append(Prefill(sequence, sequence.planned, count, last, sequence.told))
        sequence.planned += count
        if last:
            self._prefilling.remove(sequence)
            self._decoding = np.append(self._decoding, sequence.slot)
        return count

    # --- admission ---

    def _find(self, sequence: Sequence) -> tuple[Resume, np.ndarray]:
        """Where a waiting sequence would start, and the cached pages it would use. At least one token is computed."""
        most = min(len(sequence.names), (sequence.total - 1) // self.serve.page_size)
        if self.rule.mode == "none" or not most or sequence.ask.sampling.prompt_logprobs is not None:
            return Resume(), np.zeros(0, np.int32)
        sequence.run = self.pages.follow(sequence.names, most, sequence.run)
        found = sequence.run.pages
        if self.rule.mode == "retain":
            found = found[: self.tails.longest(sequence.names, len(found))]
        resume = self.rule.resume(len(found) * self.serve.page_size)
        return resume, found[: resume.cached // self.serve.page_size]

    def _admit(self) -> Sequence | None:
        """The head of the line gets a slot and its cached pages, if the rest of its prompt fits beside the promised."""
        sequence = self.waiting.head(self.step)
        if sequence is None:
            return None
        resume, found = self._find(sequence)
        need = -(-sequence.total // self.serve.page_size) - len(found)
        idle = int((self.pages.refs[found] == 0).sum())
        if need + idle + self._promised > self.pages.free:
            return None
        self.waiting.remove(sequence)
        self._place(sequence, resume, found)
        return sequence

    def _place(self, sequence: Sequence, resume: Resume, found: np.ndarray) -> None:
        t, serve, slot = self.table, self.serve, self._slots.pop()
        ask, prompt, size = sequence.ask, len(sequence.ask.tokens), serve.page_size
        limit = min(prompt + ask.sampling.max_tokens, self.limits.context, serve.pages * size)
        t.place(slot, sequence.handle, sequence.epoch, prompt, limit, ask.sampling)
        self.pages.hold(found)
        sequence.slot, sequence.planned, sequence.target = slot, resume.start, sequence.total
        aged = self.step - sequence.since >= serve.max_wait_steps
        sequence.rank = () if aged else self.rank(sequence)  # () stands before every other
        t.pages[slot, : len(found)] = found
        t.generated[slot, : len(sequence.output)] = sequence.output
        t.total[slot], t.computed[slot], t.capacity[slot] = sequence.total, resume.start, len(found) * size
        t.published[slot] = len(found)
        named = self.rule.mode != "none" and sequence.cacheable(size)
        t.name_at[slot] = (1 + len(found)) * size if named else NEVER
        t.write_from[slot], t.floor[slot] = resume.cached, resume.floor
        whole = serve.prefill == "full" or ask.sampling.prompt_logprobs is not None
        t.kept_from[slot] = 0 if whole else max(0, sequence.total - self.rule.window)
        if self.rule.mode == "retain" and len(found):
            self._copies.append(Copy(self.tails.slot(sequence.names[len(found) - 1]), slot))
        if not sequence.epoch:
            sequence.cached, sequence.replayed = resume.cached, resume.cached - resume.start
            self.counts["prompt_tokens"] += prompt
            self.counts["hit_tokens"] += resume.cached
        self.counts["replayed_tokens"] += resume.cached - resume.start
        self.running[slot] = sequence
        self._prefilling.append(sequence)
        self._promised += self._missing(sequence)

    def nothing(self) -> Plan:
        """The plan of a rank that has no work in a step its peers take."""
        self._in_flight += 1
        return Plan(self.table, np.zeros(0, np.int64), 0)

    # --- after a step ---

    def settle(self, plan: Plan) -> Plan:
        """The plan as it can be launched now: without sequences that ended meanwhile, with the copies of rings due. One
        that is empty now need not be launched: copies wait for the next."""
        plan = plan.without_ended()
        if len(plan):
            self._in_flight += 1
            plan.copies, self._copies = self._copies, []
        return plan

    def update(self, plan: Plan, drawn: Drawn) -> Outputs:
        """Apply what a step drew: tokens, stops, finished requests, pages that are written now. Results of sequences
        that ended or were preempted meanwhile are dropped whole."""
        self._in_flight -= len(plan) > 0
        slots, handles, counts, tokens = plan.slots, plan.handles, drawn.counts, drawn.tokens
        prompts: dict[int, Logprobs] = {}
        if plan.prefills or not plan.whole:
            live = plan.live()
            for p, alive in zip(plan.prefills, live[len(plan.decode) :].tolist(), strict=True):
                if alive:
                    self._advance(p)
                    if p.sequence.handle in drawn.prompt_logprobs:
                        prompts[p.sequence.handle] = drawn.prompt_logprobs[p.sequence.handle]
            rows = live & (counts > 0)
            if not rows.all():
                slots, handles, counts, tokens = slots[rows], handles[rows], counts[rows], tokens[rows]
        t = self.table
        added = t.append(slots, tokens, counts)
        keep = added.keep
        for slot in slots[t.computed[slots] >= t.name_at[slots]].tolist():
            self._publish(slot)
        for i in added.ended.tolist():
            sequence = self.running[int(slots[i])]
            self._leave(sequence)
            self._finish(sequence, "stop" if added.stopped is not None and added.stopped[i] else "length")
        if added.stopped is not None:
            handles, keep = handles[keep > 0], keep[keep > 0]
        logprobs = {}
        if drawn.logprobs:
            kept = zip(handles.tolist(), keep.tolist(), strict=True)
            logprobs = {h: drawn.logprobs[h].cut(0, n) for h, n in kept if h in drawn.logprobs}
        ended, self._ended = self._ended, []
        return Outputs(handles, keep.astype(np.int32), added.flat, logprobs, prompts, ended)

    def _advance(self, p: Prefill) -> None:
        """A stretch of a prefill is in the cache."""
        sequence, slot = p.sequence, p.sequence.slot
        self.table.computed[slot] = p.start + p.count
        sequence.told = max(sequence.told, p.start + p.count)
        if self.table.computed[slot] >= self.table.name_at[slot]:
            self._publish(slot)

    def flush(self) -> Outputs:
        """What ended without a step: refusals and aborts."""
        none = np.zeros(0, np.int32)
        ended, self._ended = self._ended, []
        return Outputs(none.astype(np.int64), none, none, finished=ended)

    def _publish(self, slot: int) -> None:
        """Name the pages that are full now. While a sequence decodes this can wait until there are a few, but for
        ``retain``: rings must be copied before they move on."""
        t, size, sequence = self.table, self.table.page_size, self.running[slot]
        computed = int(t.computed[slot])
        full = computed // size
        self._name(slot, full)
        retain = self.rule.mode == "retain"
        t.name_at[slot] = (full + (1 if retain or computed < sequence.target else NAMED_TOGETHER)) * size
        if retain and computed - full * size <= self.limits.drafts:
            kept = self.tails.store(sequence.named(full - 1, full, t)[0], full)
            if kept is not None:
                self._copies.append(Copy(slot, kept))

    def _name(self, slot: int, full: int) -> None:
        """Name its first ``full`` pages, which are written."""
        t, first = self.table, int(self.table.published[slot])
        if full > first:
            self.pages.publish(t.pages[slot, first:full].tolist(), self.running[slot].named(first, full, t))
            t.published[slot] = full

    def check(self) -> None:
        """Assert that no page, slot or sequence is lost or doubled."""
        t = self.table
        self.pages.check(t.held(s) for s in self.running)
        assert sorted([*self.running, *self._slots]) == list(range(1, self.serve.max_batch + 1))
        assert all(s.slot == slot and t.handle[slot] == s.handle for slot, s in self.running.items())
        prefilling = [s.slot for s in self._prefilling]
        assert sorted([*prefilling, *self._decoding.tolist()]) == sorted(self.running)
        assert self._promised == sum(map(self._missing, self._prefilling)), "promised pages"
        for slot in self.running:
            assert t.computed[slot] <= t.total[slot] <= t.limit[slot] and t.computed[slot] <= t.capacity[slot]
