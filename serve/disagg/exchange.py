"""What an engine does about requests of other engines, between two steps: fetch what they lent, lend what it prefilled.

No step is in flight between steps: pages that are free are free on the device, too.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np

from serve.disagg.handoff import Handoff, Returned, Rules
from serve.disagg.lease import Pulse
from serve.disagg.loads import Loads
from serve.disagg.transfer import Transfer
from serve.request import Abort, Ask, Handed, Outputs
from serve.schedule.scheduler import Scheduler
from serve.schedule.windows import WindowRule

LOOK_S = 0.002  # until a copy under way is looked at again


class Alone:
    """An engine that hands nothing over."""

    tick_s: float | None = None

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler

    def sort(self, messages: list[Ask | Abort], now: float) -> list[Ask | Abort]:
        """The messages that are for the scheduler."""
        kept = []
        for message in messages:
            if isinstance(message, Ask) and (message.hand_over or message.handoff is not None):
                self.scheduler.end(message.handle, "error", "this engine hands nothing over: use serve=disagg")
            else:
                kept.append(message)
        return kept

    def turn(self, now: float) -> None:
        pass

    def lend(self, outputs: Outputs, now: float) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}

    def check(self) -> None:
        self.scheduler.check()

    def close(self) -> None:
        pass


class Closing(Protocol):
    def close(self) -> None: ...


class Exchange:
    """``pulse`` keeps leases alive while a step takes long; ``owned`` is closed with it, in this order."""

    def __init__(
        self, scheduler: Scheduler, transfer: Transfer, rules: Rules, pulse: Pulse | None = None,
        owned: tuple[Closing, ...] = (),
    ):  # fmt: skip
        self.scheduler, self.transfer, self.rules = scheduler, transfer, rules
        limits, serve = scheduler.limits, scheduler.serve
        most = min(limits.context, serve.pages * serve.page_size)
        ahead = 1 + 2 * (1 + limits.drafts)  # the token that came with it, and a step planned while one runs
        rule = None if rules.window == "send" else WindowRule(rules.window, limits.window, limits.layers)
        self.loads = Loads(rules, transfer, scheduler.pages, scheduler.slots, ahead, most, rule)
        self.lent: dict[int, Handoff] = {}  # by handle
        self._pulse, self._owned = pulse, owned
        self._turns = 0

    @property
    def tick_s(self) -> float | None:
        """Seconds after which `turn` is due though no message comes; None: there is nothing to look after."""
        if len(self.loads) or self.transfer.busy:
            return LOOK_S
        return None if self.transfer.idle else self.rules.retry_s

    def sort(self, messages: list[Ask | Abort], now: float) -> list[Ask | Abort]:
        """The messages that are for the scheduler; requests with a handoff are loaded first."""
        return [m for m in messages if not (self._abort(m, now) if isinstance(m, Abort) else self._load(m, now))]

    def _load(self, ask: Ask, now: float) -> bool:
        if ask.handoff is None:
            return False
        refusal = self.loads.add(ask, now)
        if refusal:
            self.scheduler.end(ask.handle, "error", refusal)
        return True

    def _abort(self, message: Abort, now: float) -> bool:
        lent = self.lent.pop(message.handle, None)
        if lent is not None:
            self.transfer.revoke(lent)
            return True
        if not self.loads.abort(message.handle, now):
            return False
        self.scheduler.end(message.handle, "abort")
        return True

    def turn(self, now: float) -> None:
        """Letters, copies and leases get on; what landed runs, what was lost is computed here or ends."""
        self._turns += 1
        events = self.transfer.poll(now, self._turns)
        self.loads.take(events)
        if any(isinstance(event, Returned) for event in events):
            self.lent = {handle: lent for handle, lent in self.lent.items() if self.transfer.lends(lent)}
        for ready in self.loads.finished():
            self.scheduler.adopt(ready.ask, ready.pages, ready.cached, ready.slot, ready.resume)
        for ask, why in self.loads.failed():
            if self.rules.fallback == "recompute":
                self.scheduler.add([replace(ask, handoff=None)])
            else:
                self.scheduler.end(ask.handle, "error", f"the handoff failed: {why}")
        self._admit(now)

    def _admit(self, now: float) -> None:
        if not self.loads.waiting:
            return
        slots, unsettled = self.scheduler.slots, self.scheduler.residents.unsettled()
        held_back = [slot for slot in slots if slot in unsettled]
        slots[:] = [slot for slot in slots if slot not in unsettled]
        self.loads.admit(self.scheduler.promised, self._turns, now)
        slots += held_back

    def lend(self, outputs: Outputs, now: float) -> None:
        """Lend what has just been prefilled, and add the handoffs to the step's ``outputs``."""
        for sequence, pages, slot, tokens in self.scheduler.parted:
            handoff = self.transfer.lend(pages, slot, tokens, now)
            self.lent[sequence.handle] = handoff
            outputs.handed.append(Handed(sequence.handle, handoff, sequence.cached, sequence.replayed))
        self.scheduler.parted.clear()

    def stats(self) -> dict[str, float]:
        return self.transfer.stats()

    def check(self) -> None:
        """Assert that no page or slot is lost or doubled, those that are lent or loading included."""
        leases = self.transfer.leases()
        pages: list[np.ndarray] = [*(lease.pages for lease in leases), *self.loads.held()]
        self.scheduler.check(pages, [*(lease.slot for lease in leases), *self.loads.slots_held()])

    def close(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
        for thing in self._owned:
            thing.close()
