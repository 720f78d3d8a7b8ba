"""The transfer port of an engine: prefilled requests lent to others, requests of others fetched. No threads, no clock.

One object per engine, whatever its role (prefill, decode, both). It never touches the scheduler's pages: it is told
which are lent or taken, and says when a hold ends. What the engine does with it, in its loop:

    transfer.poll(now, done)     once a step, before planning: letters in and out, copies watched; returns events
    transfer.lend(...)           prefill side, after the step that wrote the last row of a prompt: the sequence leaves
                                 its slot and pages without releasing them; the Handoff that comes back goes to the
                                 router. `Returned` tells when to release those pages and that slot
    transfer.expect / begin / cancel   decode side: serve/disagg/loads.py calls these

``done`` is the number of the last step that is over on the device: pages that a step in flight may still write to are
not written to before (``after`` of `begin`). Letters go over a `Net`, in order from one engine to another; they may be
lost, and then are said again. The router passes the Handoff on with the request's Ask.

What a load is worth is decided by leases alone (serve/disagg/lease.py): a read that ended while its lease was trusted
has read what was lent. ``window=send`` copies rings, tails and last tokens of the slot: exact. With `replay` they are
rebuilt at the decode side as after a prefix hit, from windows that are cut short: approximate; with `halo`, exact.
"""

from typing import Protocol

import numpy as np

from parallel.port import Link
from serve.disagg.card import Card
from serve.disagg.copies import Counts
from serve.disagg.handoff import Beat, Beaten, Event, Handoff, Letter, Push, Pushed, Rules
from serve.disagg.lease import Borrower, Lease, Lender
from serve.disagg.peers import Peers
from serve.disagg.sink import Load, Sink
from serve.disagg.source import Source


class Net(Protocol):
    """Letters between engines, by name."""

    def send(self, to: str, letter: Letter) -> None:
        """Never waits; a letter to nobody is lost. Called by the loop and by the thread of beats."""
        ...

    def take(self) -> list[Letter]: ...


class Transfer:
    """``name`` of the engine and of its link; ``born`` is larger in each life of an engine (a start time will do).

    The link has the pools of the cache registered, in the order of serve/disagg/copies.py: pages, rings, tails, tokens.
    """

    def __init__(self, name: str, born: int, card: Card, link: Link, net: Net, rules: Rules):
        if link.name != name:
            raise ValueError(f"engine {name} has a link named {link.name}: they must be the same")
        self.net, self.link, self.rules = net, link, rules
        self.counts = Counts()
        self.peers = Peers(name, born, card, link, rules, net.send)
        self.lender = Lender(rules)
        self.borrower = Borrower(rules, self.peers.write)
        self.source = Source(self.peers, self.lender, link, rules, self.counts)
        self.sink = Sink(self.peers, self.borrower, link, rules, self.counts)

    @property
    def busy(self) -> bool:
        """Whether bytes move, or may: `poll` should be called again soon."""
        return bool(self.sink.loads or self.sink.draining) or self.source.busy

    @property
    def idle(self) -> bool:
        """Whether nothing is lent, loading or draining."""
        return not (self.lender.leases or self.sink.loads or self.sink.draining)

    def leases(self) -> list[Lease]:
        """What is lent and not returned."""
        return list(self.lender.leases.values())

    def lends(self, handoff: Handoff) -> bool:
        """Whether that is still out."""
        return handoff.lease in self.lender.leases

    def draining(self) -> list[Load]:
        """Loads that failed or were cancelled, to whose pages somebody may still write."""
        return self.sink.draining

    # --- prefill side ---

    def lend(self, pages: np.ndarray, slot: int, tokens: int, now: float) -> Handoff:
        """Hold ``pages`` [ceil(tokens / page_size)] and ``slot`` of a request of which ``tokens`` are in the cache."""
        return self.source.lend(pages, slot, tokens, now)

    def revoke(self, handoff: Handoff) -> bool:
        """Take back a handoff that no decode side has asked about; False if one has (it drops or loses the lease)."""
        return self.lender.revoke(handoff.lease)

    # --- decode side ---

    def expect(self, handle: int, handoff: Handoff, now: float) -> None:
        """A request with a handoff has arrived: its lease is kept until it lands, is lost or cancelled."""
        self.sink.expect(handle, handoff, now)

    def begin(self, handle: int, pages: np.ndarray, skip: int, slot: int, after: int, now: float) -> None:
        """Load it into ``pages``, of which the first ``skip`` are here already, and ``slot``, once step ``after`` is
        done."""
        self.sink.begin(handle, pages, skip, slot, after, now)

    def cancel(self, handle: int, now: float) -> bool:
        """Forget a load, in whatever state. Nothing but Returned comes of it. False if there is none."""
        return self.sink.cancel(handle, now)

    # --- both ---

    def poll(self, now: float, done: int) -> list[Event]:
        """One turn: returns what landed, was lost, or came back."""
        for letter in self.net.take():
            if self.peers.current(letter):
                self._take(letter, now)
        for engine in self.peers.ended:
            self.source.end(engine)
        self.peers.ended.clear()
        self.link.notes()  # lets a link without a thread of its own get on
        self.sink.advance(done, now)
        self.source.advance(now)
        self.peers.greet(now)
        self.borrower.beats(now)
        events, self.sink.events = [*self.sink.events, *self.lender.returned()], []
        return events

    def beat(self, now: float) -> None:
        """Renew leases: for a thread (serve/disagg/lease.py `Pulse`), where steps may take longer than a lease."""
        self.borrower.beats(now)

    def _take(self, letter: Letter, now: float) -> None:
        engine, body = (letter.sender, letter.born), letter.body
        if isinstance(body, Beat):
            self.peers.write(*engine, self.source.beat(engine, body, now))
        elif isinstance(body, Beaten):
            self.borrower.answered(engine, body)
            self.sink.unknown(engine, body.seq, body.unknown, now)
        elif isinstance(body, Push):
            self.source.push(engine, body, self.peers.known[letter.sender], now)
        elif isinstance(body, Pushed):
            self.sink.pushed(engine, body, now)
        else:
            self.peers.take(letter, now)

    def stats(self) -> dict[str, float]:
        """Gauges, and counters since the start, whose names end with ``_total``."""
        sink, lender = self.sink, self.lender
        counters = {**vars(self.counts), **sink.ends, **{f"lease_{k}": v for k, v in lender.counts.items()}}
        gauges = {"loading": len(sink.loads), "draining": len(sink.draining), "leases": len(lender.leases)}
        return {
            **{f"transfer_{name}": value for name, value in gauges.items()},
            **{f"transfer_{name}_total": value for name, value in counters.items()},
        }
