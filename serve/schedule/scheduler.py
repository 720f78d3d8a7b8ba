"""The scheduler: who takes part in the next step. Plain Python and numpy, no torch, no clock.

One rule: a sequence has ``total`` tokens of which ``computed`` are in the cache, and a step lets the second catch up.
Prefill (whole or in chunks), decode, drafts, prefix hits and preemption are all that rule. Decoding sequences are
arrays (serve/schedule/table.py), so that a step's work hardly grows with the batch and not at all with prompts.
"""

from collections.abc import Callable, Iterable

import numpy as np

from serve.request import Abort, Ask, Finish, Logprobs, Outputs, prompt_fault
from serve.schedule.plan import Drawn, Parted, Plan, Prefill
from serve.schedule.queue import Queue
from serve.schedule.residents import Residents
from serve.schedule.sequence import Sequence
from serve.schedule.windows import Resume
from serve.settings import Limits


class Scheduler:
    """``key(sequence, cached)`` is the policy (serve/schedule/policies)."""

    def __init__(self, limits: Limits, key: Callable):
        serve = limits.serve
        self.limits, self.serve = limits, serve
        self.residents = Residents(limits)
        self.pages, self.table = self.residents.pages, self.residents.table
        self.running, self.slots, self.rule = self.residents.running, self.residents.slots, self.residents.rule
        self.rank = lambda s: key(s, lambda: self.residents.find(s)[0].cached)
        self.waiting = Queue(self.rank, serve.policy.rekey, serve.max_wait_steps)
        self.step = 0
        self.counts = dict.fromkeys(("asked", "hit_tokens", "replayed_tokens", "prompt_tokens", "preempted"), 0)
        self.promised = 0  # pages that running prefills are still to take
        self._prefilling: list[Sequence] = []
        self._parting: list[Sequence] = []  # their prefill is planned to its end, and they go on elsewhere
        self.parted: list[Parted] = []  # for serve/disagg/exchange.py to take
        self._decoding = np.zeros(0, np.int64)
        self._in_flight = 0  # steps settled and not yet updated
        self._arrivals = 0
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
            refusal, waiting = self._refusal(message), len(self.waiting)
            if refusal or waiting >= self.serve.max_waiting:
                why = refusal or f"{waiting} wait already (serve.max_waiting): try later"
                self.end(message.handle, "error", why, unavailable=not refusal)
            else:
                self.waiting.push(self._sequence(message))

    def _sequence(self, ask: Ask) -> Sequence:
        self._arrivals += 1
        told = len(ask.tokens) if len(ask.generated) else 0
        return Sequence(ask, self._arrivals, self.step, told=told, names=ask.hashes, output=ask.generated)

    def _refusal(self, ask: Ask) -> str:
        n, most = len(ask.tokens) + len(ask.generated), self.serve.pages * self.serve.page_size
        fault = prompt_fault(ask.tokens, self.limits.context)
        if fault:
            return f"the prompt {fault}"
        if len(ask.generated) >= ask.sampling.max_tokens or n >= self.limits.context:
            return f"{len(ask.generated)} tokens are generated already, of {ask.sampling.max_tokens}: it is complete"
        if n + 1 > most:
            return f"the prompt has {n} tokens, serve.pages hold {most}: it can never fit"
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
        self._unlist(sequence)
        self.residents.leave(sequence)

    def _unlist(self, sequence: Sequence) -> None:
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self.promised -= self.residents.missing(sequence)
        elif sequence in self._parting:
            self._parting.remove(sequence)
        else:
            self._decoding = self._decoding[self._decoding != sequence.slot]

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the line; what it has generated stays, what it has computed is found again if pages last."""
        t, slot = self.table, sequence.slot
        sequence.output = t.generated[slot, : t.total[slot] - t.prompt[slot]].copy()
        self._leave(sequence)
        sequence.names, sequence.own = sequence.names + sequence.own, []
        sequence.epoch += 1
        self.counts["preempted"] += 1
        self.waiting.push(sequence)

    # --- requests that come from or go to other engines ---

    def _part(self, sequence: Sequence) -> None:
        """It leaves, and neither slot nor pages are free."""
        self._unlist(sequence)
        self.parted.append(self.residents.part(sequence))

    def adopt(self, ask: Ask, pages: np.ndarray, named: int, slot: int, resume: Resume) -> None:
        """Run a request whose tokens before ``resume.start`` another engine computed, in ``pages``, the first ``named``
        found here, and ``slot``: both are taken already."""
        sequence = self._sequence(ask)
        sequence.cached = named * self.serve.page_size
        self.residents.place(sequence, resume, pages, named, slot)
        self._begin(sequence, resume)

    def end(self, handle: int, reason: str, message: str = "", unavailable: bool = False) -> None:
        """Tell that a request ended which is not (or no longer) the scheduler's."""
        self._ended.append(Finish(handle, reason, message=message, unavailable=unavailable))

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
        while budget > 0 and self.slots and self.counts["preempted"] == preempted:
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
        missing = self.residents.missing(sequence)
        if not self._grow(sequence, sequence.planned + count):
            return 0
        self.promised -= missing - self.residents.missing(sequence)
        last = count == left
        prefills.append(Prefill(sequence, sequence.planned, count, last, sequence.told))
        sequence.planned += count
        if last:
            self._prefilling.remove(sequence)
            if sequence.ask.hand_over:
                self._parting.append(sequence)
            else:
                self._decoding = np.append(self._decoding, sequence.slot)
        return count

    # --- admission ---

    def _admit(self) -> Sequence | None:
        """The head of the line gets a slot and its cached pages, if the rest of its prompt fits beside the promised."""
        sequence = self.waiting.head(self.step)
        if sequence is None:
            return None
        resume, found = self.residents.find(sequence)
        need = -(-sequence.total // self.serve.page_size) - len(found)
        idle = int((self.pages.refs[found] == 0).sum())
        if need + idle + self.promised > self.pages.free:
            return None
        self.waiting.remove(sequence)
        if not sequence.epoch:
            sequence.cached, sequence.replayed = resume.cached, resume.cached - resume.start
            self.counts["prompt_tokens"] += len(sequence.ask.tokens)
            self.counts["hit_tokens"] += resume.cached
        self.residents.admit(sequence, resume, found)
        self._begin(sequence, resume)
        return sequence

    def _begin(self, sequence: Sequence, resume: Resume) -> None:
        aged = self.step - sequence.since >= self.serve.max_wait_steps
        sequence.rank = () if aged else self.rank(sequence)  # () stands before every other
        self.counts["replayed_tokens"] += resume.cached - resume.start
        self._prefilling.append(sequence)
        self.promised += self.residents.missing(sequence)

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
            plan.copies = self.residents.take_copies()
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
            self.residents.publish(slot)
        for i in added.ended.tolist():
            sequence = self.running[int(slots[i])]
            self._leave(sequence)
            self._finish(sequence, "stop" if added.stopped is not None and added.stopped[i] else "length")
        for p in plan.prefills:
            if p.last and p.sequence in self._parting:
                self._part(p.sequence)
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
            self.residents.publish(slot)

    def flush(self) -> Outputs:
        """What ended without a step: refusals and aborts."""
        none = np.zeros(0, np.int32)
        ended, self._ended = self._ended, []
        return Outputs(none.astype(np.int64), none, none, finished=ended)

    def check(self, pages: Iterable[np.ndarray] = (), slots: Iterable[int] = ()) -> None:
        """Assert that no page, slot or sequence is lost or doubled. ``pages`` and ``slots`` are held by others."""
        self.residents.check(pages, slots)
        prefilling = [s.slot for s in (*self._prefilling, *self._parting)]
        assert sorted([*prefilling, *self._decoding.tolist()]) == sorted(self.running)
        assert self.promised == sum(map(self.residents.missing, self._prefilling)), "promised pages"
