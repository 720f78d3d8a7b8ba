"""Requests that come with a handoff: waiting for pages, loading, ready to decode. The decode side of the scheduler.

At most ``max_kv_loads_per_step`` loads begin in a step: each costs host time, and one slow rank delays all. Whatever
begins, loads that are finished are given out first, every step, and count as running from the start: they hold their
slot, and pages for the whole prompt and one step more, so that none of them can wait for pages of another.

How serve/disagg/exchange.py uses it (`Pages` and the list of free slots are the scheduler's):

    refused = loads.add(ask, now)            an Ask with a handoff; text of a refusal, which has dropped the lease
    loads.abort(handle, now)                 True if it was here
    loads.take(events)                       of transfer.poll; pages and slots that come back are released here
    loads.finished()                         (Ready, ...) to be placed as running: it resumes at ``resume``, holding
                                             ``pages`` and ``slot`` already
    loads.failed()                           (ask, why): rules.fallback says whether to queue it as usual or end it
    loads.admit(promised, after, now)        begin loads; ``promised`` pages are spoken for
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from serve.disagg.handoff import Event, Handoff, Landed, Lost, Returned, Rules
from serve.disagg.transfer import Transfer
from serve.request import Ask
from serve.schedule.pages import Pages
from serve.schedule.windows import Resume, WindowRule


@dataclass(eq=False)
class Waiting:
    """``pages``, ``skip`` (those found in the cache) and ``slot`` once it loads."""

    ask: Ask
    order: int
    pages: np.ndarray | None = None
    skip: int = 0
    slot: int = 0

    @property
    def handoff(self) -> Handoff:
        return self.ask.handoff


@dataclass(frozen=True, eq=False)
class Ready:
    """A request to go on: rows of its prompt are in ``pages``; windows are whole where ``resume`` starts at the end of
    the prompt, else what lies after ``resume.start`` is computed again."""

    ask: Ask
    pages: np.ndarray  # with those for the first step
    cached: int  # of them, found here and not sent
    slot: int
    resume: Resume


class Loads:
    """``reserve`` tokens beyond the prompt are held from the start: what one step can add. ``most`` tokens fit.
    ``rebuild``: the rule by which windows that are not sent are computed again; None: they are sent."""

    def __init__(
        self,
        rules: Rules,
        transfer: Transfer,
        pages: Pages,
        slots: list[int],
        reserve: int,
        most: int,
        rebuild: WindowRule | None = None,
    ):
        self.rules, self.transfer, self.pages, self.slots = rules, transfer, pages, slots
        self.reserve, self.most = reserve, most
        self.rebuild = rebuild
        self.waiting: dict[int, Waiting] = {}  # by handle
        self.loading: dict[int, Waiting] = {}
        self._landed: list[Waiting] = []
        self._failed: list[tuple[Ask, str]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.loading) + len(self._landed) + len(self._failed)

    def add(self, ask: Ask, now: float) -> str:
        """Take in a request with a handoff; its lease is kept from now on. Text of a refusal, which has given it up."""
        self.transfer.expect(ask.handle, ask.handoff, now)
        why = self._refusal(ask)
        if why:
            self.transfer.cancel(ask.handle, now)
            return why
        self._order += 1
        self.waiting[ask.handle] = Waiting(ask, self._order)
        return ""

    def _refusal(self, ask: Ask) -> str:
        n, lent = len(ask.tokens) + len(ask.generated), ask.handoff.tokens
        if not len(ask.generated) or n != lent + 1:
            return f"the request has {n} tokens, {len(ask.generated)} of them generated, and its handoff {lent}"
        if n > self.most or self._need(lent) >= self.pages.count:
            return f"the request has {n} tokens, this engine has room for {self.most}: it can never fit"
        return ""

    def abort(self, handle: int, now: float) -> bool:
        """Forget a request; False if it is not here. Its pages come back by `take`."""
        if self.waiting.pop(handle, None) or self.loading.pop(handle, None):
            self.transfer.cancel(handle, now)
            return True
        for landed in self._landed:
            if landed.ask.handle == handle:
                self._landed.remove(landed)
                self._release(landed.pages, landed.slot)
                return True
        left = [entry for entry in self._failed if entry[0].handle != handle]
        self._failed, before = left, len(self._failed)
        return len(left) < before

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Returned):
                self._release(event.pages, event.slot)
            elif isinstance(event, Landed):
                self._landed.append(self.loading.pop(event.handle))
            elif isinstance(event, Lost):
                lost = self.loading.pop(event.handle, None) or self.waiting.pop(event.handle)
                self._failed.append((lost.ask, event.why))

    def finished(self) -> list[Ready]:
        """Loads that are complete, each once."""
        landed, self._landed = self._landed, []
        return [self._ready(w) for w in landed]

    def failed(self) -> list[tuple[Ask, str]]:
        failed, self._failed = self._failed, []
        return failed

    def admit(self, promised: int, after: int, now: float) -> int:
        """Begin loads, by priority and arrival; returns how many. None passes one that does not fit."""
        begun = 0
        line = sorted(self.waiting.values(), key=lambda w: (w.ask.priority, w.order))
        for waiting in line[: self.rules.max_kv_loads_per_step]:
            if not self.slots or not self._place(waiting, promised):
                break  # of this loop alone: finished loads were given out already
            handle = waiting.ask.handle
            self.loading[handle] = self.waiting.pop(handle)
            self.transfer.begin(handle, waiting.pages, waiting.skip, waiting.slot, after, now)
            begun += 1
        return begun

    def _need(self, tokens: int) -> int:
        return -(-min(tokens + self.reserve, self.most) // self.pages.page_size)

    def _place(self, w: Waiting, promised: int) -> bool:
        """Take a slot, the pages of its prefix that are here, and the rest; False if they are not to be had."""
        size, theirs = self.pages.page_size, w.handoff.page_size
        found = self.pages.find(w.ask.hashes, min(len(w.ask.hashes), (w.handoff.tokens - 1) // size))
        if theirs > size:
            found = found[: len(found) // (theirs // size) * (theirs // size)]
        need = self._need(w.handoff.tokens) - len(found)
        idle = int((self.pages.refs[found] == 0).sum())
        if need + idle + promised > self.pages.free:
            return False
        self.pages.hold(found)
        w.pages = np.concatenate((found, self.pages.take(need)))
        w.skip, w.slot = len(found), self.slots.pop()
        return True

    def _ready(self, w: Waiting) -> Ready:
        n = w.handoff.tokens
        resume = Resume(n, n) if self.rebuild is None else self.rebuild.rebuild(n)
        return Ready(w.ask, w.pages, w.skip, w.slot, resume)

    def _release(self, pages: np.ndarray, slot: int) -> None:
        self.pages.release(pages)
        if slot:
            self.slots.append(slot)

    def held(self) -> list[np.ndarray]:
        """The pages of loads and of what drains, one array a holder: for `Pages.check`."""
        return [one.pages for one in self._holders()]

    def slots_held(self) -> list[int]:
        return [one.slot for one in self._holders()]

    def _holders(self) -> list:
        return [*self.loading.values(), *self._landed, *self.transfer.draining()]
