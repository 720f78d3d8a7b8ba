"""Engines without a model on a net that delays and loses letters, in virtual time: the protocol of transfers alone.

Pages are real (serve/schedule/pages.py) and have contents: what a prefill writes names its request, what is free is
poison. So a copy from or to pages that are another's shows, wherever it comes from.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from parallel.local import Fabric, LocalLink
from serve.disagg.card import Card
from serve.disagg.handoff import Handoff, Letter, Rules
from serve.disagg.loads import Loads
from serve.disagg.transfer import Transfer
from serve.request import Ask, Sampling
from serve.schedule.pages import Pages

PAGE, PLANES, SLOT = 64, (24, 8, 12, 4), (40, 16, 8)  # tokens; bytes
CARD = Card(1, "tiny", "packed", "float32", PAGE, PLANES, 3, 8, SLOT)
RULES = Rules(lease_s=10, grace_s=2, beat_s=2, retry_s=0.5, timeout_s=20, quarantine_s=24)
POISON = 0xAA


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Channels:
    """In order between two engines; ``delay(sender, to)`` seconds, None loses the letter."""

    def __init__(self, clock: Clock, delay=lambda sender, to, letter: 0.01):
        self.clock, self.delay = clock, delay
        self.queues: dict[tuple[str, str], deque] = defaultdict(deque)
        self.sent: list[tuple[str, str, object]] = []

    def send(self, sender: str, to: str, letter: Letter) -> None:
        self.sent.append((sender, to, letter.body))
        after = self.delay(sender, to, letter)
        if after is None:
            return
        queue = self.queues[sender, to]
        last = queue[-1][0] if queue else 0.0
        queue.append((max(last, self.clock() + after), letter))

    def take(self, to: str) -> list[Letter]:
        out = []
        for (_, receiver), queue in self.queues.items():
            while receiver == to and queue and queue[0][0] <= self.clock():
                out.append(queue.popleft()[1])
        return out


@dataclass
class End:
    """One engine's view of the channels."""

    channels: Channels
    name: str

    def send(self, to: str, letter: Letter) -> None:
        self.channels.send(self.name, to, letter)

    def take(self) -> list[Letter]:
        return self.channels.take(self.name)


def lent(ask: Ask, handoff: Handoff) -> Ask:
    """The Ask as a router sends it on: with the handoff, and the token that the prefill drew."""
    return replace(ask, handoff=handoff, generated=np.zeros(1, np.int32))


@lru_cache(1 << 16)
def mark(tag: int, place: int, size: int) -> np.ndarray:
    """What page ``place`` of request ``tag`` holds: no two alike, and no poison."""
    return np.random.default_rng((tag, place)).integers(0, POISON, size, np.uint8)


class Engine:
    """Prefill and decode side at once. ``lag``: steps in flight."""

    def __init__(self, rack: "Rack", name: str, born: int, card: Card = CARD, rules: Rules = RULES, **sizes):
        self.rack, self.name, self.card, self.rules = rack, name, card, rules
        count, slots = sizes.get("pages", 24), sizes.get("slots", 6)
        self.pages = Pages(count + 1, card.page_size)
        self.slots = list(range(slots, 0, -1))
        self.memory = [np.full((count + 1, card.page_bytes), POISON, np.uint8)]
        self.memory += [np.full((slots + 1, size), POISON, np.uint8) for size in card.slot]
        link = LocalLink(rack.fabric, name)
        for pool in self.memory:
            link.register(pool)
        self.transfer = Transfer(name, born, card, link, End(rack.channels, name), rules)
        self.loads = Loads(
            rules, self.transfer, self.pages, self.slots, sizes.get("reserve", 1), count * card.page_size
        )
        self.step, self.lag = 0, sizes.get("lag", 0)
        self.lent: list[tuple[np.ndarray, int]] = []
        self.running: dict[int, tuple] = {}  # handle -> (Ready, tag)
        self.begun = 0  # loads, in the last step

    # --- prefill side ---

    def prefill(self, tag: int, tokens: int) -> Handoff | None:
        """Pages and slot full of what only this request has, lent; None if there is no room."""
        need = -(-tokens // self.card.page_size)
        if not self.slots or self.pages.free < need:
            return None
        pages, slot = np.array(self.pages.take(need), np.int32), self.slots.pop()
        self._expect_poison(pages, slot)
        self._fill(pages, slot, tag)
        self.lent.append((pages, slot))
        return self.transfer.lend(pages, slot, tokens, self.rack.clock())

    # --- a step ---

    def turn(self) -> None:
        now = self.rack.clock()
        self.step += 1
        events = self.transfer.poll(now, self.step - 1 - self.lag)
        for event in events:
            if hasattr(event, "pages"):
                self._poison(event.pages, event.slot)
                self.lent = [(p, s) for p, s in self.lent if p is not event.pages]
        self.loads.take(events)
        for ready in self.loads.finished():
            self.rack.ready(self, ready)
        for ask, why in self.loads.failed():
            self.rack.lost(self, ask, why)
        before = list(self.loads.loading)
        self.begun = self.loads.admit(0, self.step - 1, now)
        for handle, w in self.loads.loading.items():
            if handle not in before:
                self._expect_poison(w.pages[w.skip :], w.slot)
        if self.step % 3 == 0:
            self.check()

    def run(self, ready, tag: int) -> None:
        self.verify(ready, tag)
        self.running[ready.ask.handle] = ready, tag

    def finish(self, handle: int) -> None:
        ready, tag = self.running.pop(handle)
        self.verify(ready, tag)
        self._poison(ready.pages, ready.slot)
        self.pages.release(ready.pages)
        self.slots.append(ready.slot)

    def abort(self, handle: int) -> bool:
        landed = [w for w in self.loads._landed if w.ask.handle == handle]
        for w in landed:
            self._poison(w.pages, w.slot)
        return self.loads.abort(handle, self.rack.clock())

    def verify(self, ready, tag: int) -> None:
        """All that was lent is here, byte for byte, though page sizes may differ."""
        tokens = len(ready.ask.tokens)
        assert (self.tokens_of(ready.pages, tokens) == self.rack.written(tag, tokens)).all(), "pages of another"
        for pool, size, place in zip(self.memory[1:], self.card.slot, (-1, -2, -3)):
            if self.rules.window == "send":
                assert (pool[ready.slot] == mark(tag, 2**20 + place, size)).all(), "rings of another"

    def tokens_of(self, pages: np.ndarray, tokens: int) -> np.ndarray:
        """Bytes of the first whole cells (64 tokens each, plane by plane) of a request, whatever the page size."""
        parts = self.card.page_size // PAGE
        cells = []
        for page in pages:
            planes = np.split(self.memory[0][page], np.cumsum(self.card.planes)[:-1])
            shares = [np.split(plane, parts) for plane in planes]
            cells += [np.concatenate([share[i] for share in shares]) for i in range(parts)]
        return np.stack(cells)[: -(-tokens // PAGE)]

    def check(self) -> None:
        holders = [p for p, _ in self.lent] + self.loads.held() + [r.pages for r, _ in self.running.values()]
        self.pages.check(holders)
        assert len(self.loads.loading) + len(self.running) <= len(self.memory[1]) - 1

    @property
    def quiet(self) -> bool:
        full = len(self.slots) == len(self.memory[1]) - 1
        return self.transfer.idle and not len(self.loads) and not self.running and not self.pages.used and full

    # --- contents ---

    def _fill(self, pages: np.ndarray, slot: int, tag: int) -> None:
        parts = self.card.page_size // PAGE
        cells = self.rack.written(tag, len(pages) * self.card.page_size).reshape(len(pages), parts, -1)
        for page, group in zip(pages, cells):
            shares = [np.split(cell, np.cumsum(PLANES)[:-1]) for cell in group]
            self.memory[0][page] = np.concatenate([s[k] for k in range(len(PLANES)) for s in shares])
        for pool, size, place in zip(self.memory[1:], self.card.slot, (-1, -2, -3)):
            pool[slot] = mark(tag, 2**20 + place, size)

    def _poison(self, pages: np.ndarray, slot: int) -> None:
        self.memory[0][pages] = POISON
        for pool in self.memory[1:]:
            pool[slot] = POISON

    def _expect_poison(self, pages: np.ndarray, slot: int) -> None:
        assert (self.memory[0][pages] == POISON).all(), "somebody wrote to free pages"
        assert all((pool[slot] == POISON).all() for pool in self.memory[1:]), "somebody wrote to a free slot"


class Rack:
    """Engines by name, and what became of requests: each ends once, in ``ended``."""

    def __init__(self, **fabric):
        self.clock = Clock()
        self.fabric = Fabric(self.clock, **fabric)
        self.channels = Channels(self.clock)
        self.engines: dict[str, Engine] = {}
        self.ended: dict[int, str] = {}
        self.tags: dict[int, int] = {}
        self.asks = 0

    def add(self, name: str, **more) -> Engine:
        self.engines[name] = Engine(self, name, int(self.clock() * 1000) + 1, **more)
        return self.engines[name]

    def crash(self, name: str) -> None:
        """The process ends: memory, books and letters to it are gone."""
        self.fabric.kill(name)
        del self.engines[name]
        for (_, to), queue in self.channels.queues.items():
            if to == name:
                queue.clear()

    def written(self, tag: int, tokens: int) -> np.ndarray:
        return np.stack([mark(tag, i, sum(PLANES)) for i in range(-(-tokens // PAGE))])

    def ask(self, tokens: int, **more) -> Ask:
        self.asks += 1
        return Ask(self.asks, np.zeros(tokens, np.int32), more.pop("hashes", []), Sampling(4), **more)

    def send(self, source: Engine, sink: Engine, tokens: int = 100, **more) -> tuple[Ask, Handoff]:
        """A request that ``source`` prefills and ``sink`` is to decode."""
        ask = self.ask(tokens, **more)
        handoff = source.prefill(ask.handle, tokens)
        assert handoff is not None, "no room to prefill"
        why = sink.loads.add(lent(ask, handoff), self.clock())
        if why:
            self.end(ask.handle, f"refused: {why}")
        return ask, handoff

    def ready(self, engine: Engine, ready) -> None:
        engine.run(ready, self.tags.get(ready.ask.handle, ready.ask.handle))
        self.end(ready.ask.handle, "landed")

    def lost(self, engine: Engine, ask: Ask, why: str) -> None:
        self.end(ask.handle, f"lost: {why}")

    def end(self, handle: int, how: str) -> None:
        assert handle not in self.ended, f"{handle} ended twice: {self.ended[handle]}, {how}"
        self.ended[handle] = how

    def turn(self, seconds: float = 0.05) -> None:
        self.clock.time += seconds
        for engine in list(self.engines.values()):
            engine.turn()

    def until(self, condition, limit_s: float = 120.0, step_s: float = 0.05) -> None:
        end = self.clock() + limit_s
        while not condition():
            assert self.clock() < end, f"not within {limit_s} s; ended: {self.ended}"
            self.turn(step_s)

    def quiet(self) -> bool:
        for engine in self.engines.values():
            for handle in list(engine.running):
                engine.finish(handle)
        return all(e.quiet for e in self.engines.values())


def rack(rules: Rules = RULES, **fabric) -> tuple[Rack, Engine, Engine]:
    """A prefill engine P and a decode engine D."""
    made = Rack(**fabric)
    return made, made.add("P", rules=rules), made.add("D", rules=rules)


def push(rules: Rules = RULES) -> Rules:
    return replace(rules, mode="push")
