"""The prefill side of a transfer: pages lent until they are read, and orders to write them carried out."""

from dataclasses import dataclass

import numpy as np

from parallel.port import DONE, Link, LinkError, PeerLost
from serve.disagg.copies import Copy, Counts, Place, between
from serve.disagg.handoff import Beat, Beaten, Handoff, Push, Pushed, Rules
from serve.disagg.lease import Lender
from serve.disagg.peers import Peer, Peers


@dataclass(eq=False)
class Order:
    engine: tuple[str, int]
    number: int
    lease: int
    copy: Copy | None = None  # None: it is over, and kept as long as its lease
    error: str = ""


class Source:
    def __init__(self, peers: Peers, lender: Lender, link: Link, rules: Rules, counts: Counts):
        self.peers, self.lender, self.link, self.rules, self.counts = peers, lender, link, rules, counts
        self._orders: dict[tuple[tuple[str, int], int], Order] = {}

    def lend(self, pages: np.ndarray, slot: int, tokens: int, now: float) -> Handoff:
        """Hold ``pages`` and ``slot`` for whoever gets the handoff; they come back as one Returned."""
        lease = self.lender.lend(pages, slot, tokens, now)
        me = self.peers
        return Handoff(me.name, me.born, lease, tokens, me.card.page_size, pages, slot)

    def beat(self, engine: tuple[str, int], beat: Beat, now: float) -> Beaten:
        """Renew and drop; tell again what became of orders that the other still counts as open."""
        for lease in beat.drop:  # first: what is dropped is not kept
            self.lender.drop(lease, engine)
        gone = tuple(lease for lease in beat.keep if not self.lender.keep(lease, engine, now))
        unknown = []
        for number in beat.orders:
            order = self._orders.get((engine, number))
            if order is None:
                unknown.append(number)
            elif order.copy is None:
                self.peers.write(*engine, Pushed(number, order.error))
        return Beaten(beat.seq, gone, tuple(unknown))

    def push(self, engine: tuple[str, int], push: Push, peer: Peer, now: float) -> None:
        """Start to write; said twice is said once."""
        key = engine, push.order
        if key in self._orders:
            return
        order = self._orders[key] = Order(engine, push.order, push.lease)
        lease = self.lender.get(push.lease)
        if lease is None or lease.holder not in (None, engine):
            self._over(order, f"lease {push.lease} is held no more")
        elif not peer.met or peer.card is None:
            self._over(order, "there is no connection")
        else:
            here = Place(self.peers.card, lease.pages, lease.slot)
            there = Place(peer.card, push.pages, push.slot)
            begin = push.skip * peer.card.page_size
            pair, pieces = between(here, there, lease.tokens, begin, self.rules.window == "send")
            lease.pins += 1
            order.copy = Copy(self.link, "write", peer.name, pair, self.rules.max_descriptors, self.counts)
            self.counts.add(pair, pieces, lease.tokens - begin)

    def advance(self, now: float) -> None:
        self.lender.expire(now)
        for order in list(self._orders.values()):
            if order.copy is not None:
                self._write(order, now)
            elif self.lender.get(order.lease) is None:
                del self._orders[order.engine, order.number]

    def end(self, engine: tuple[str, int]) -> None:
        """That life of the decode side is over."""
        self.lender.drop_all(engine)

    @property
    def busy(self) -> bool:
        return any(order.copy is not None for order in self._orders.values())

    def _write(self, order: Order, now: float) -> None:
        if self.lender.get(order.lease) is None and not order.error:  # nobody waits for it any more
            order.copy.cancel()
            order.error = f"lease {order.lease} ended"
        try:
            if order.copy.poll() != DONE:
                return
        except PeerLost as error:
            self._end_copy(order, str(error))
            self.peers.broke(self.peers.known[order.engine[0]], now)
        except (LinkError, ValueError) as error:
            self._end_copy(order, str(error))
        else:
            self._end_copy(order, order.error)

    def _end_copy(self, order: Order, error: str) -> None:
        order.copy = None
        self.lender.unpin(order.lease)
        self._over(order, error)

    def _over(self, order: Order, error: str) -> None:
        order.error = error
        self.peers.write(*order.engine, Pushed(order.number, error))
