"""Sequences that have a slot: their pages, the names of these, and copies of rings that are due."""

from collections.abc import Iterable

import numpy as np

from serve.schedule.pages import Pages
from serve.schedule.plan import Copy, Parted
from serve.schedule.sequence import Sequence
from serve.schedule.table import NEVER, Table
from serve.schedule.windows import Resume, Tails, WindowRule
from serve.settings import Limits

NAMED_TOGETHER = 8  # pages of generated tokens that are named together: a name costs less in company


class Residents:
    """Slots 1 to ``max_batch`` are sequences, those above hold retained windows. ``slots``: the free ones."""

    def __init__(self, limits: Limits):
        serve = limits.serve
        self.limits, self.serve = limits, serve
        self.rule = WindowRule(serve.window, limits.window, limits.layers)
        self.pages = Pages(serve.pages + 1, serve.page_size)
        self.table = Table(serve.max_batch, limits.context, serve.page_size, limits.drafts)
        self.running: dict[int, Sequence] = {}  # by slot
        self.slots = list(range(serve.max_batch, 0, -1))
        self._tails = Tails(range(serve.max_batch + 1, serve.slots + 1))
        self._copies: list[Copy] = []

    # --- in ---

    def find(self, sequence: Sequence) -> tuple[Resume, np.ndarray]:
        """Where a waiting sequence would start, and the cached pages it would use. At least one token is computed."""
        most = min(len(sequence.names), (sequence.total - 1) // self.serve.page_size)
        if self.rule.mode == "none" or not most or sequence.ask.sampling.prompt_logprobs is not None:
            return Resume(), np.zeros(0, np.int32)
        sequence.run = self.pages.follow(sequence.names, most, sequence.run)
        found = sequence.run.pages
        if self.rule.mode == "retain":
            found = found[: self._tails.longest(sequence.names, len(found))]
        resume = self.rule.resume(len(found) * self.serve.page_size)
        return resume, found[: resume.cached // self.serve.page_size]

    def admit(self, sequence: Sequence, resume: Resume, found: np.ndarray) -> None:
        """Into a free slot, with the pages ``found`` in the cache."""
        self.pages.hold(found)
        self.place(sequence, resume, found, len(found), self.slots.pop())
        if self.rule.mode == "retain" and len(found):
            self._copies.append(Copy(self._tails.slot(sequence.names[len(found) - 1]), sequence.slot))

    def place(self, sequence: Sequence, resume: Resume, pages: np.ndarray, named: int, slot: int) -> None:
        """Into ``slot`` with ``pages``, both its own already; the first ``named`` pages have names."""
        t, serve = self.table, self.serve
        ask, prompt, size = sequence.ask, len(sequence.ask.tokens), serve.page_size
        limit = min(prompt + ask.sampling.max_tokens, self.limits.context, serve.pages * size)
        t.place(slot, sequence.handle, sequence.epoch, prompt, limit, ask.sampling)
        sequence.slot, sequence.planned, sequence.target = slot, resume.start, sequence.total
        t.pages[slot, : len(pages)] = pages
        t.generated[slot, : len(sequence.output)] = sequence.output
        t.total[slot], t.computed[slot], t.capacity[slot] = sequence.total, resume.start, len(pages) * size
        t.published[slot] = named
        keeps = self.rule.mode != "none" and sequence.cacheable(size)
        t.name_at[slot] = (1 + named) * size if keeps else NEVER
        t.write_from[slot], t.floor[slot] = resume.cached, resume.floor
        whole = serve.prefill == "full" or ask.sampling.prompt_logprobs is not None
        t.kept_from[slot] = 0 if whole else max(0, sequence.total - self.rule.window)
        self.running[slot] = sequence

    # --- while they run ---

    def missing(self, sequence: Sequence) -> int:
        """Pages that its prefill is still to take."""
        size = self.serve.page_size
        return max(0, -(-sequence.target // size) - int(self.table.capacity[sequence.slot]) // size)

    def publish(self, slot: int) -> None:
        """Name the pages that are full now. While a sequence decodes this can wait until there are a few, but for
        ``retain``: rings must be copied before they move on."""
        t, size, sequence = self.table, self.table.page_size, self.running[slot]
        computed = int(t.computed[slot])
        full = computed // size
        self._name(slot, full)
        retain = self.rule.mode == "retain"
        t.name_at[slot] = (full + (1 if retain or computed < sequence.target else NAMED_TOGETHER)) * size
        if retain and computed - full * size <= self.limits.drafts:
            kept = self._tails.store(sequence.named(full - 1, full, t)[0], full)
            if kept is not None:
                self._copies.append(Copy(slot, kept))

    def _name(self, slot: int, full: int) -> None:
        """Name its first ``full`` pages, which are written."""
        t, first = self.table, int(self.table.published[slot])
        if full > first:
            self.pages.publish(t.pages[slot, first:full].tolist(), self.running[slot].named(first, full, t))
            t.published[slot] = full

    def take_copies(self) -> list[Copy]:
        """Copies of rings that are due before the next step, in order."""
        copies, self._copies = self._copies, []
        return copies

    def unsettled(self) -> set[int]:
        """Slots that copies are still due from or to: nothing else may write to them before the next step. While nobody
        runs no step comes, and what is due is called off."""
        if not self.running:
            for copy in self.take_copies():
                self._tails.forget(copy.target)
        return {slot for copy in self._copies for slot in (copy.source, copy.target)}

    # --- out ---

    def part(self, sequence: Sequence) -> Parted:
        """It leaves, and neither its slot nor its pages are free: they are the caller's."""
        t, slot = self.table, sequence.slot
        tokens = int(t.computed[slot])
        if t.name_at[slot] < NEVER:
            self._name(slot, tokens // t.page_size)
        pages = t.held(slot).copy()
        t.clear(slot)
        del self.running[slot]
        sequence.slot = 0
        return Parted(sequence, pages, slot, tokens)

    def leave(self, sequence: Sequence) -> None:
        """Give back slot and pages."""
        parted = self.part(sequence)
        self.pages.release(parted.pages)
        self.slots.append(parted.slot)

    def check(self, pages: Iterable[np.ndarray], slots: Iterable[int]) -> None:
        """Assert that no page or slot is lost or doubled. ``pages`` and ``slots`` are held by others."""
        t = self.table
        self.pages.check([*(t.held(s) for s in self.running), *pages])
        assert sorted([*self.running, *self.slots, *slots]) == list(range(1, self.serve.max_batch + 1))
        assert all(s.slot == slot and t.handle[slot] == s.handle for slot, s in self.running.items())
        for slot in self.running:
            assert t.computed[slot] <= t.total[slot] <= t.limit[slot] and t.computed[slot] <= t.capacity[slot]
