"""The decode side of a transfer: loads, from the request's arrival to its last byte. S states, no threads, no clock.

    queued -> placed -> copying (pull: we read)    -> landed
                     -> ordered (push: they write) -> landed
    any of them, by failure or cancel -> draining (somebody may still write to its pages) -> returned

Exactly one of Landed and Lost is told for each load that is not cancelled; its lease is dropped once in every case;
pages and slot of one that did not land come back once, when nobody writes to them any more.
"""

from dataclasses import dataclass

import numpy as np

from parallel.port import DONE, Link, LinkError, PeerLost
from serve.disagg.copies import Copy, Counts, Place, between
from serve.disagg.handoff import Event, Handoff, Landed, Lost, Push, Pushed, Returned, Rules
from serve.disagg.lease import Borrower
from serve.disagg.peers import OPEN, REFUSED, Peer, Peers

QUEUED, PLACED, COPYING, ORDERED, DRAINING = "queued", "placed", "copying", "ordered", "draining"


@dataclass(eq=False)
class Load:
    handle: int
    handoff: Handoff
    state: str = QUEUED
    until_s: float = 0.0  # of the state: then it failed, or its quarantine is over
    pages: np.ndarray | None = None
    skip: int = 0  # first pages, which are here already
    slot: int = 0
    after: int = 0  # step that may still write to its pages
    copy: Copy | None = None
    leased: bool = True  # its lease is kept, and to be dropped
    order: int = 0
    said: int = 0  # last beat before the order was said
    breaks: int = 0  # of the peer, when the copy began

    @property
    def engine(self) -> tuple[str, int]:
        return self.handoff.engine, self.handoff.born


class Sink:
    def __init__(self, peers: Peers, borrower: Borrower, link: Link, rules: Rules, counts: Counts):
        self.peers, self.borrower, self.link, self.rules, self.counts = peers, borrower, link, rules, counts
        self.loads: dict[int, Load] = {}  # by handle, those that may land
        self.draining: list[Load] = []
        self.events: list[Event] = []
        self.ends = dict.fromkeys(("landed", "lost", "cancelled", "lapsed", "quarantined", "ignored"), 0)
        self._orders: dict[int, Load] = {}
        self._order = 0

    # --- the scheduler's side ---

    def expect(self, handle: int, handoff: Handoff, now: float) -> None:
        """A request is here and waits for pages: keep its lease. Every handle once at a time."""
        assert handle not in self.loads, handle
        load = self.loads[handle] = Load(handle, handoff, until_s=now + self.rules.timeout_s)
        load.leased = self.borrower.expect(load.engine, handoff.lease)
        self.peers.reach(handoff.engine, handoff.born)

    def begin(self, handle: int, pages: np.ndarray, skip: int, slot: int, after: int, now: float) -> None:
        """Its ``pages`` and ``slot`` are taken; the first ``skip`` hold what they should. Nothing is written to the
        others before step ``after`` is done."""
        load = self.loads[handle]
        assert load.state == QUEUED, load.state
        load.pages, load.skip, load.slot, load.after = pages, skip, slot, after
        load.state, load.until_s = PLACED, now + self.rules.timeout_s

    def cancel(self, handle: int, now: float) -> bool:
        """Give up a load in whatever state; False if there is none."""
        load = self.loads.get(handle)
        if load is None:
            return False
        self.ends["cancelled"] += 1
        self._leave(load, now)
        return True

    # --- progress ---

    def advance(self, done: int, now: float) -> None:
        """``done``: the last step that is over on the device."""
        for load in list(self.loads.values()):
            self._advance(load, done, now)
        for load in list(self.draining):
            self._drain(load, now)

    def _advance(self, load: Load, done: int, now: float) -> None:
        peer = self.peers.known[load.handoff.engine]
        why = self._trouble(load, peer, now)
        if why:
            self._lose(load, why, now)
        elif load.state == PLACED and done >= load.after and self._ready(load, peer, now):
            self._start(load, peer, now)
        elif load.state == COPYING:
            self._watch(load, peer, now)

    def _trouble(self, load: Load, peer: Peer, now: float) -> str:
        """Why it cannot go on, or empty."""
        name = load.handoff.engine
        if not load.leased:
            return f"lease {load.handoff.lease} of engine {name} is or was another request's"
        if peer.born != load.handoff.born:
            return f"engine {name} has restarted"
        if peer.state == REFUSED:
            return f"engine {name} does not fit this one: {peer.why}"
        kept = self.borrower.kept(load.engine, load.handoff.lease)
        if kept.gone and load.state != ORDERED:  # an order is answered, whatever became of the lease
            return f"engine {name} holds lease {load.handoff.lease} no more"
        if load.state in (COPYING, ORDERED) and peer.breaks != load.breaks:
            return f"the connection to engine {name} broke"
        late = max(load.until_s, kept.until_s) if load.state == QUEUED else load.until_s
        if now > late:
            return f"engine {name} has not answered in time" + (f" ({peer.why})" if peer.why else "")
        return ""

    def _ready(self, load: Load, peer: Peer, now: float) -> bool:
        trusted = self.borrower.kept(load.engine, load.handoff.lease).until_s
        return peer.state == OPEN and now < trusted

    def _start(self, load: Load, peer: Peer, now: float) -> None:
        load.breaks, h = peer.breaks, load.handoff
        if self.rules.mode == "push":
            self._order += 1
            load.order, load.state = self._order, ORDERED
            self._orders[load.order] = load
            self._say_order(load)
            return
        here, there = Place(self.peers.card, load.pages, load.slot), Place(peer.card, h.pages, h.slot)
        begin = load.skip * self.peers.card.page_size
        pair, pieces = between(here, there, h.tokens, begin, self.rules.window == "send")
        load.copy = Copy(self.link, "read", peer.name, pair, self.rules.max_descriptors, self.counts)
        load.state = COPYING
        self.counts.add(pair, pieces, h.tokens - begin)
        self._watch(load, peer, now)

    def _say_order(self, load: Load) -> None:
        push = Push(load.order, load.handoff.lease, load.pages, load.skip, load.slot)
        self.peers.write(*load.engine, push)
        load.said = self.borrower.order(load.engine, load.order)

    def _watch(self, load: Load, peer: Peer, now: float) -> None:
        copy = load.copy
        if now >= self.borrower.kept(load.engine, load.handoff.lease).until_s:
            copy.cancel()  # for good: an answer that comes now does not make up for what is not posted
        try:
            if copy.poll() != DONE:
                return
        except PeerLost as error:
            load.copy = None
            self._lose(load, str(error), now)
            self.peers.broke(peer, now)
            return
        except (LinkError, ValueError) as error:  # spans outside the peer's regions are its lie, not our end
            load.copy = None
            self._lose(load, str(error), now)
            return
        load.copy = None
        if copy.cancelled:
            self.ends["lapsed"] += 1
            self._lose(load, f"the lease of engine {peer.name} lapsed while its pages were read", now)
        else:
            self._land(load, now)

    def pushed(self, engine: tuple[str, int], body: Pushed, now: float) -> None:
        """An order is over. One that is closed already is ignored."""
        load = self._orders.get(body.order)
        if load is None or load.engine != engine:
            self.ends["ignored"] += 1
            return
        self._close_order(load)
        if load.state == DRAINING:
            self._drain(load, now)
        elif body.error:
            self._lose(load, f"engine {load.handoff.engine}: {body.error}", now)
        else:
            self._land(load, now)

    def unknown(self, engine: tuple[str, int], seq: int, orders: tuple[int, ...], now: float) -> None:
        """At beat ``seq`` nothing of these orders was under way: say them again, or be glad. An answer to a beat that
        was sent before the order was last said tells nothing of it."""
        for number in orders:
            load = self._orders.get(number)
            if load is None or load.engine != engine or seq <= load.said:
                continue
            if load.state == ORDERED:
                self._say_order(load)
            else:
                self._close_order(load)
                self._drain(load, now)

    # --- ends ---

    def _land(self, load: Load, now: float) -> None:
        self.ends["landed"] += 1
        del self.loads[load.handle]
        self._drop(load, now)
        self.events.append(Landed(load.handle))

    def _lose(self, load: Load, why: str, now: float) -> None:
        self.ends["lost"] += 1
        self.events.append(Lost(load.handle, why))
        self._leave(load, now)

    def _leave(self, load: Load, now: float) -> None:
        """Drop the lease as soon as we read no more (which stops what the peer writes), and return pages and slot as
        soon as nobody writes to them."""
        del self.loads[load.handle]
        if load.copy is None:
            self._drop(load, now)
        else:
            load.copy.cancel()
        if load.pages is None:
            return
        load.state, load.until_s = DRAINING, now + self.rules.quarantine_s
        self.draining.append(load)
        self._drain(load, now)

    def _drain(self, load: Load, now: float) -> None:
        if load.state != DRAINING:
            return
        peer = self.peers.known[load.handoff.engine]
        dead = peer.born != load.handoff.born  # it lives again: what it wrote before is over
        if load.copy is not None:
            try:
                load.copy = None if load.copy.poll() == DONE else load.copy
            except LinkError:
                load.copy = None
        if load.order and dead:
            self._close_order(load)
        if (load.copy is not None or load.order) and now >= load.until_s:
            self.ends["quarantined"] += 1
            self.peers.broke(peer, now)  # its connection is cut, so that nothing comes over it later
            load.copy = None
            if load.order:
                self._close_order(load)
        if load.copy is None:
            self._drop(load, now)
        if load.copy is None and not load.order:
            self.draining.remove(load)
            load.state = "returned"
            self.events.append(Returned(load.pages, load.slot))

    def _drop(self, load: Load, now: float) -> None:
        if load.leased:
            load.leased = False
            self.borrower.drop(load.engine, load.handoff.lease, now)

    def _close_order(self, load: Load) -> None:
        self.borrower.close(load.engine, load.order)
        del self._orders[load.order]
        load.order = 0
