"""Who waits for what time, lane by lane, and how long nothing may happen.

A lane is *busy* while any of its streams is neither waiting for a time nor for other streams. When nothing is busy only
the next timer can change that, so an idle stretch longer than its cap is cut at once: its lane's clock (or everyone's)
jumps ahead. Caps as InferenceX has them: none of the whole system's idle stretches over 10 s, no tree's over 300 s;
``gap_s`` instead bounds each wait by itself.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve.clock import Clock


@dataclass(frozen=True)
class Caps:
    """Longest idle stretches, in played seconds; None for no bound."""

    system_s: float | None = None
    tree_s: float | None = None
    gap_s: float | None = None


class Over(Exception):
    """The run has ended: nothing starts any more."""


@dataclass(eq=False)
class Timer:
    lane: int
    due_s: float  # by the lane's clock
    future: asyncio.Future
    fired: bool = False


@dataclass(eq=False)
class Stream:
    """One conversation under way. ``gates`` are told when it ends."""

    lane: int
    done: bool = False
    gates: list["Gate"] = field(default_factory=list)


@dataclass(eq=False)
class Gate:
    left: int
    future: asyncio.Future


class Agenda:
    """``capped_s``: seconds cut from idle stretches, by cap."""

    def __init__(self, clock: Clock, caps: Caps):
        self.clock, self.caps = clock, caps
        self.closed = False
        self.capped_s = {"system": 0.0, "tree": 0.0, "gap": 0.0}
        self._busy: Counter[int] = Counter()
        self._total = 0
        self._skipped = 0.0  # of everyone's clock
        self._ahead: Counter[int] = Counter()  # of a lane's clock
        self._timers: dict[int, list[Timer]] = {}
        self._heap: list[tuple[float, int, Timer]] = []
        self._pushed = 0
        self._changed = asyncio.Event()
        self._alarm: tuple[float, asyncio.Task] | None = None

    def time(self, lane: int) -> float:
        """The lane's clock: real time and all that was cut."""
        return self.clock.now() + self._skipped + self._ahead[lane]

    # --- what streams do ---

    def begin(self, lane: int) -> Stream:
        """A stream of the lane is at work from now on."""
        self._enter(lane)
        return Stream(lane)

    def end(self, stream: Stream) -> None:
        stream.done = True
        for gate in stream.gates:
            gate.left -= 1
            if not gate.left and not gate.future.done():
                self._enter(stream.lane)
                gate.future.set_result(None)
        self._leave(stream.lane)

    async def until(self, lane: int, due_s: float) -> None:
        """Wait for a time of the lane's clock. Raises Over once the run has ended."""
        self._check()
        wait = due_s - self.time(lane)
        if self.caps.gap_s is not None and wait > self.caps.gap_s:
            self.capped_s["gap"] += wait - self.caps.gap_s
            due_s -= wait - self.caps.gap_s
        if due_s <= self.time(lane):
            return
        timer = Timer(lane, due_s, asyncio.get_running_loop().create_future())
        self._timers.setdefault(lane, []).append(timer)
        self._push(timer)
        self._leave(lane)
        await timer.future

    async def join(self, lane: int, streams: Sequence[Stream]) -> None:
        """Wait until these have ended. Raises Over once the run has."""
        left = [s for s in streams if not s.done]
        if not left:
            return
        gate = Gate(len(left), asyncio.get_running_loop().create_future())
        for stream in left:
            stream.gates.append(gate)
        self._leave(lane)
        await gate.future
        self._check()

    # --- the clockwork ---

    async def run(self) -> None:
        """Wake streams at their times until `close`."""
        while not self.closed:
            self._changed.clear()
            self._fire()
            if self._heap:
                self._arm(self._heap[0][0] - self._skipped)
            await self._changed.wait()

    def close(self) -> None:
        """End the run: every waiting stream gets Over, those at work find out at their next wait."""
        self.closed = True
        for timers in self._timers.values():
            for timer in timers:
                self._enter(timer.lane)
                if not timer.future.done():
                    timer.future.set_exception(Over())
        self._timers, self._heap = {}, []
        if self._alarm:
            self._alarm[1].cancel()
        self._changed.set()

    def _check(self) -> None:
        if self.closed:
            raise Over

    def _enter(self, lane: int) -> None:
        self._busy[lane] += 1
        self._total += 1

    def _leave(self, lane: int) -> None:
        self._busy[lane] -= 1
        self._total -= 1
        if not self._busy[lane]:
            self._cut_tree(lane)
        if not self._total:
            self._cut_system()
        self._changed.set()

    def _cut_tree(self, lane: int) -> None:
        timers = self._timers.get(lane)
        if self.caps.tree_s is None or not timers:
            return
        excess = min(t.due_s for t in timers) - self.time(lane) - self.caps.tree_s
        if excess > 0:
            self.capped_s["tree"] += excess
            self._ahead[lane] += excess
            for timer in timers:
                self._push(timer)

    def _cut_system(self) -> None:
        self._drop_stale()
        if self.caps.system_s is None or not self._heap:
            return
        excess = self._heap[0][0] - self._skipped - self.clock.now() - self.caps.system_s
        if excess > 0:
            self.capped_s["system"] += excess
            self._skipped += excess

    def _push(self, timer: Timer) -> None:
        """Order the timer by everyone's clock; an entry from before its lane's last jump is stale."""
        self._pushed += 1
        heapq.heappush(self._heap, (timer.due_s - self._ahead[timer.lane], self._pushed, timer))

    def _drop_stale(self) -> None:
        while self._heap and self._stale(self._heap[0]):
            heapq.heappop(self._heap)

    def _stale(self, entry: tuple[float, int, Timer]) -> bool:
        due, _, timer = entry
        return timer.fired or due != timer.due_s - self._ahead[timer.lane]

    def _fire(self) -> None:
        while True:
            self._drop_stale()
            if not self._heap or self._heap[0][0] - self._skipped > self.clock.now():
                return
            timer = heapq.heappop(self._heap)[2]
            timer.fired = True
            self._timers[timer.lane].remove(timer)
            self._enter(timer.lane)
            if not timer.future.done():
                timer.future.set_result(None)

    def _arm(self, when_s: float) -> None:
        """Have `run` woken at a real time, unless an earlier alarm will."""
        if self._alarm:
            if self._alarm[0] <= when_s and not self._alarm[1].done():
                return
            self._alarm[1].cancel()
        self._alarm = (when_s, self.clock.spawn(self._ring(when_s)))

    async def _ring(self, when_s: float) -> None:
        await self.clock.sleep(when_s - self.clock.now())
        self._changed.set()
