"""Leases on pages and slots lent for a transfer: the lender's book and the borrower's. Seconds of the callers' clocks.

The lender frees a lease ``lease_s + grace_s`` after the last beat that it *received*. The borrower trusts a lease until
``lease_s`` after it *sent* the last beat that was answered. So a copy that ended while the borrower trusts its lease
has read what was lent, however slow the messages were.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from serve.disagg.handoff import Beat, Beaten, Returned, Rules


@dataclass(eq=False)
class Lease:
    pages: np.ndarray
    slot: int
    tokens: int
    until_s: float
    holder: tuple[str, int] | None = None  # name and life of who keeps it: one at a time
    pins: int = 0  # writes that read from its pages
    ended: bool = False


class Lender:
    """Each lease ends once: dropped by its holder, revoked or expired. Its pages come back once no write reads them."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.leases: dict[int, Lease] = {}  # those whose pages are out
        self.counts = dict.fromkeys(("lent", "dropped", "expired", "revoked"), 0)
        self._returned: list[Returned] = []
        self._number = 0

    def lend(self, pages: np.ndarray, slot: int, tokens: int, now: float) -> int:
        self._number += 1
        self.leases[self._number] = Lease(pages, slot, tokens, now + self.rules.lease_s + self.rules.grace_s)
        self.counts["lent"] += 1
        return self._number

    def get(self, number: int) -> Lease | None:
        lease = self.leases.get(number)
        return None if lease is None or lease.ended else lease

    def keep(self, number: int, holder: tuple[str, int], now: float) -> bool:
        """Renew; False if it is gone, or another's."""
        lease = self.get(number)
        if lease is None or (lease.holder or holder) != holder:
            return False
        lease.holder = holder
        lease.until_s = now + self.rules.lease_s + self.rules.grace_s
        return True

    def drop(self, number: int, holder: tuple[str, int]) -> None:
        """The holder is done with it; it may say so many times, or before it ever kept it."""
        lease = self.get(number)
        if lease is not None and (lease.holder or holder) == holder:
            self._end(number, "dropped")

    def drop_all(self, holder: tuple[str, int]) -> None:
        """That life of the holder is over."""
        for number in [n for n, lease in self.leases.items() if lease.holder == holder and not lease.ended]:
            self._end(number, "dropped")

    def revoke(self, number: int) -> bool:
        """End a lease that nobody has kept yet; False if it is gone or somebody may be reading."""
        lease = self.get(number)
        if lease is None or lease.holder is not None:
            return False
        self._end(number, "revoked")
        return True

    def expire(self, now: float) -> None:
        for number in [n for n, lease in self.leases.items() if lease.until_s <= now and not lease.ended]:
            self._end(number, "expired")

    def unpin(self, number: int) -> None:
        self.leases[number].pins -= 1
        self._give_back(number)

    def returned(self) -> list[Returned]:
        """What came back since the last call."""
        out, self._returned = self._returned, []
        return out

    def _end(self, number: int, how: str) -> None:
        self.leases[number].ended = True
        self.counts[how] += 1
        self._give_back(number)

    def _give_back(self, number: int) -> None:
        lease = self.leases[number]
        if lease.ended and not lease.pins:
            del self.leases[number]
            self._returned.append(Returned(lease.pages, lease.slot))


@dataclass
class Kept:
    """One lease as the borrower sees it."""

    until_s: float = -np.inf  # trusted
    gone: bool = False


@dataclass
class Debt:
    """What is borrowed from one life of one engine."""

    kept: dict[int, Kept] = field(default_factory=dict)
    drops: dict[int, float] = field(default_factory=dict)  # lease -> when there is no more point in saying so
    orders: dict[int, None] = field(default_factory=dict)
    seq: int = 0  # of the last beat sent and of the last answered
    answered: int = 0
    sent_s: float = -np.inf
    hurry: bool = False
    log: dict[int, tuple[float, Beat]] = field(default_factory=dict)


class Borrower:
    """Beats may be sent by a thread of their own (`Pulse`), so that a long step does not let leases lapse: the lock is
    held while a beat is made *and* sent, so that the order of letters is that of the book."""

    def __init__(self, rules: Rules, send: Callable[[str, int, Beat], None]):
        """``send(engine, born, beat)`` must not wait."""
        self.rules, self._send = rules, send
        self._debts: dict[tuple[str, int], Debt] = {}
        self._lock = threading.Lock()
        self._seq = 0  # never used twice: an answer to an earlier debt must not count for a later one

    def expect(self, engine: tuple[str, int], lease: int) -> bool:
        """Keep ``lease`` from now on; False if it is kept for another, or being dropped."""
        with self._lock:
            debt = self._debts.setdefault(engine, Debt())
            if lease in debt.kept or lease in debt.drops:
                return False
            debt.kept[lease] = Kept()
            debt.hurry = True
            return True

    def drop(self, engine: tuple[str, int], lease: int, now: float) -> None:
        """Give up a lease; said until answered, or until it has expired by itself."""
        with self._lock:
            debt = self._debts[engine]
            if not debt.kept.pop(lease).gone:
                debt.drops[lease] = now + self.rules.lease_s + self.rules.grace_s
                debt.hurry = True

    def order(self, engine: tuple[str, int], order: int) -> int:
        """Ask about ``order``, which was just said, in every beat from now on; returns the last beat that did not."""
        with self._lock:
            self._debts.setdefault(engine, Debt()).orders[order] = None
            return self._seq

    def close(self, engine: tuple[str, int], order: int) -> None:
        """The order is over."""
        with self._lock:
            self._debts[engine].orders.pop(order, None)

    def kept(self, engine: tuple[str, int], lease: int) -> Kept:
        return self._debts[engine].kept[lease]

    def answered(self, engine: tuple[str, int], answer: Beaten) -> None:
        with self._lock:
            debt = self._debts.get(engine)
            if debt is None or answer.seq not in debt.log:
                return
            sent_s, beat = debt.log[answer.seq]
            debt.log = {seq: entry for seq, entry in debt.log.items() if seq > answer.seq}
            debt.answered = answer.seq
            gone = frozenset(answer.gone)
            for lease in beat.keep:
                kept = debt.kept.get(lease)
                if kept is not None:
                    kept.gone |= lease in gone
                    kept.until_s = max(kept.until_s, -np.inf if kept.gone else sent_s + self.rules.lease_s)
            for lease in beat.drop:
                debt.drops.pop(lease, None)

    def beats(self, now: float) -> None:
        """Send what is due. Any thread may call it."""
        with self._lock:
            for (engine, born), debt in list(self._debts.items()):
                debt.drops = {lease: end for lease, end in debt.drops.items() if end > now}
                if not (debt.kept or debt.drops or debt.orders):
                    del self._debts[engine, born]
                elif debt.hurry or now >= debt.sent_s + self._wait(debt):
                    self._beat(engine, born, debt, now)

    def _wait(self, debt: Debt) -> float:
        unheard = debt.answered < debt.seq
        return min(self.rules.retry_s, self.rules.beat_s) if unheard else self.rules.beat_s

    def _beat(self, engine: str, born: int, debt: Debt, now: float) -> None:
        self._seq += 1
        debt.seq, debt.sent_s, debt.hurry = self._seq, now, False
        keep = tuple(lease for lease, kept in debt.kept.items() if not kept.gone)
        beat = Beat(debt.seq, keep, tuple(debt.drops), tuple(debt.orders))
        debt.log[debt.seq] = now, beat
        if len(debt.log) > 256:  # never answered
            del debt.log[next(iter(debt.log))]
        self._send(engine, born, beat)


class Pulse:
    """A thread that calls ``beat(now())`` every ``every_s`` until it is stopped."""

    def __init__(self, beat: Callable[[float], None], now: Callable[[], float], every_s: float):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(beat, now, every_s), name="pulse", daemon=True)
        self._thread.start()

    def _run(self, beat: Callable[[float], None], now: Callable[[], float], every_s: float) -> None:
        while not self._stop.wait(every_s):
            beat(now())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
