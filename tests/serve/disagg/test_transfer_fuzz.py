"""Whole racks under random trouble: delays, losses, cuts, failing and slow copies, crashes, aborts, doubled handoffs.

For every seed: nobody reads what was freed or writes to what is another's (contents are checked), every request ends
once, and when the trouble is over no page, slot, lease or order is left on any side.
"""

from dataclasses import replace

import numpy as np
import pytest

from parallel.local import Copied, Fault
from serve.disagg.copies import PAGES
from tests.serve.disagg.rack import CARD, PAGE, POISON, RULES, Rack, lent

WIDE = replace(CARD, page_size=2 * PAGE, planes=tuple(2 * n for n in CARD.planes))
SECONDS = 40  # of trouble


class Trouble:
    def __init__(self, seed: int, mode: str):
        self.seed = seed
        self.rng = rng = np.random.default_rng((seed, mode == "push"))
        self.rules = replace(RULES, mode=mode, max_descriptors=int(rng.choice([1, 2, 4096])))
        self.rack = Rack(cost=lambda size, n: float(rng.exponential(0.05)), fault=self.fault, copied=self.copied)
        self.rack.channels.delay = self.delay
        self.sources, self.sinks = ("P", "Q"), ("D", "E")
        self.wide = [name for name in ("P", "Q", "D", "E") if rng.random() < 0.3]
        for name in (*self.sources, *self.sinks):
            self.start(name)
        self.cut: dict[tuple[str, str], float] = {}  # channel -> until when it loses all
        self.transit: list[tuple] = []
        self.calm, self.slow = False, bool(rng.random() < 0.3)
        self.crashes = 0

    def start(self, name: str) -> None:
        card = WIDE if name in self.wide else CARD
        pages = int(self.rng.integers(10, 30))
        sizes = {"pages": pages, "slots": int(self.rng.integers(2, 7)), "lag": int(self.rng.integers(2))}
        self.rack.add(name, card=card, rules=self.rules, **sizes)

    # --- what goes wrong ---

    def delay(self, sender: str, to: str, letter) -> float | None:
        if self.calm:
            return 0.01
        if self.cut.get((sender, to), 0) > self.rack.clock() or self.rng.random() < 0.03:
            return None
        return float(self.rng.exponential(0.05 if self.rng.random() < 0.95 else 2.0))

    def fault(self, op: str, link: str, peer: str) -> Fault:
        if self.calm:
            return Fault()
        late = 15.0 if self.slow else 0.9 * RULES.grace_s  # a slow rack's copies outlive leases
        delay = self.rng.random() * late if self.rng.random() < 0.1 else 0.0
        return Fault(float(delay), bool(self.rng.random() < 0.03))

    def copied(self, done: Copied) -> None:
        """Nothing free is read: by a write never, by a read where copies are not slower than the grace of leases."""
        if done.op == "read" and self.slow:
            return
        side, owner = (done.remote, done.peer) if done.op == "read" else (done.local, done.link)
        for region, at, size in side.tolist():
            if region == PAGES:
                assert (owner.regions[PAGES][at : at + size] != POISON).all(), f"{done.op} after free"

    def act(self) -> None:
        rng, rack = self.rng, self.rack
        if rng.random() < 0.25:
            self.ask()
        if rng.random() < 0.06 and rack.asks:
            self.abort(int(rng.integers(max(1, rack.asks - 12), rack.asks + 1)))
        if rng.random() < 0.008:
            channel = tuple(rng.choice([*self.sources, *self.sinks], 2, replace=False).tolist())
            self.cut[channel] = rack.clock() + float(rng.exponential(6.0))
        if rng.random() < 0.004:
            self.crash(str(rng.choice([*self.sources, *self.sinks])))
        for engine in rack.engines.values():
            for handle in list(engine.running):
                if rng.random() < 0.05:
                    engine.finish(handle)

    def ask(self) -> None:
        source = self.rack.engines[str(self.rng.choice(self.sources))]
        tokens = int(self.rng.integers(1, 5 * PAGE))
        ask = self.rack.ask(tokens, priority=int(self.rng.integers(2)))
        handoff = source.prefill(ask.handle, tokens)
        if handoff is None:
            self.rack.end(ask.handle, "no room to prefill")
            return
        wait = float(self.rng.exponential(0.1 if self.rng.random() < 0.95 else 8.0))
        self.transit.append((self.rack.clock() + wait, ask, handoff, str(self.rng.choice(self.sinks))))
        if self.rng.random() < 0.05:  # the router sends it to two
            again = self.rack.ask(tokens)
            self.rack.tags[again.handle] = ask.handle
            self.transit.append((self.rack.clock() + 2 * wait, again, handoff, str(self.rng.choice(self.sinks))))

    def deliver(self) -> None:
        due = [t for t in self.transit if t[0] <= self.rack.clock()]
        self.transit = [t for t in self.transit if t[0] > self.rack.clock()]
        for _, ask, handoff, name in due:
            why = self.rack.engines[name].loads.add(lent(ask, handoff), self.rack.clock())
            if why:
                self.rack.end(ask.handle, why)

    def abort(self, handle: int) -> None:
        for entry in list(self.transit):
            if entry[1].handle == handle:
                self.transit.remove(entry)
                source = self.rack.engines[entry[2].engine]
                if self.rng.random() < 0.5 and source.transfer.peers.born == entry[2].born:
                    source.transfer.revoke(entry[2])
                self.rack.end(handle, "aborted on the way")
        for name in self.sinks:
            if self.rack.engines[name].abort(handle):
                self.rack.end(handle, "aborted")

    def crash(self, name: str) -> None:
        self.crashes += 1
        loads = self.rack.engines[name].loads
        here = [*loads.waiting, *loads.loading, *(w.ask.handle for w in loads._landed)]
        self.rack.crash(name)
        for handle in here:
            self.rack.end(handle, "crashed")
        self.start(name)

    def run(self) -> dict[str, int]:
        while self.rack.clock() < SECONDS:
            self.act()
            self.deliver()
            self.rack.turn(0.1)
        self.calm = True
        self.cut.clear()
        self.transit = [(0.0, *entry[1:]) for entry in self.transit]
        limit = 3 * RULES.quarantine_s
        self.rack.until(lambda: (self.deliver(), not self.transit and self.rack.quiet())[1], limit, 0.25)
        assert sorted(self.rack.ended) == list(range(1, self.rack.asks + 1)), "a request never ended"
        for engine in self.rack.engines.values():
            for _ in range(2):
                engine.turn()
            assert not engine.transfer.source._orders and not engine.transfer.sink._orders
        ends = [how.split(":")[0] for how in self.rack.ended.values()]
        return {how: ends.count(how) for how in sorted({*ends})}


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("seed", range(16))
def test_nothing_leaks_whatever_goes_wrong(seed, mode):
    trouble = Trouble(seed, mode)
    print(f"seed {seed} {mode}: wide {trouble.wide}, slow {trouble.slow}", trouble.run(), "crashes", trouble.crashes)
