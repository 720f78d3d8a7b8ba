"""The engine: one loop over ports. What it runs on (a real runner or a modelled one, this machine's time or virtual
time) is the ports' affair."""

from collections.abc import Callable
from typing import Any, Protocol

from serve.disagg.exchange import Alone, Exchange
from serve.lockstep import Lockstep, Shape, Unpaced
from serve.request import Abort, Ask, Bye, Outputs, Pause, ToEngine
from serve.schedule.plan import Drawn, Plan
from serve.schedule.scheduler import Scheduler


class Mail(Protocol):
    """The front end's side: serve/mailbox.py in one process, serve/wire/pair.py between two."""

    def take(self) -> list[ToEngine]: ...

    def watch(self, fd: int) -> None: ...  # what `wait` returns for, too

    async def wait(self, timeout: float | None = None) -> None: ...

    def put(self, outputs: Outputs) -> None: ...


class RunnerPort(Protocol):
    """serve/launch.py, or a model of it."""

    def launch(self, plan: Plan, shape: Shape | None) -> Any: ...

    async def collect(self, ticket: Any) -> Drawn: ...


class Engine:
    """With ``serve.overlap`` a step is planned while the one before it runs; tokens are the same. ``now``: the clock's
    seconds."""

    def __init__(
        self, scheduler: Scheduler, device: RunnerPort, mail: Mail, now: Callable[[], float],
        lockstep: Unpaced | Lockstep | None = None, exchange: Alone | Exchange | None = None,
    ):  # fmt: skip
        self.scheduler, self.device, self.mail, self.now = scheduler, device, mail, now
        self.lockstep = lockstep or Unpaced()
        self.exchange = exchange or Alone(scheduler)
        self.overlap = bool(scheduler.serve.overlap)
        self.sums = dict.fromkeys(("steps", "tokens", "drafted", "accepted", "device_seconds", "host_seconds"), 0)
        self._next: Plan | None = None
        self._leaving = self._stopping = self._paused = False
        self._told_idle = True

    async def run(self, pause: Callable) -> None:
        """Take steps while there is work, wait for mail when there is none, until `stop`. ``pause`` is awaited between
        steps, so that whoever shares the event loop gets a turn."""
        while not self._stopping:
            if self._paused or (self.scheduler.idle and self._next is None):
                ticks = (self.lockstep.tick_s, self.exchange.tick_s)
                await self.mail.wait(min((t for t in ticks if t is not None), default=None))
            await self.step()
            await pause()
        self.lockstep.close()
        self.exchange.close()

    def stop(self) -> None:
        """Leave `run` after a step that all ranks are ready to make their last; what waits is not answered."""
        self._leaving = True

    async def step(self) -> None:
        """One turn of the loop: mail in, one step on the device, mail out."""
        begin = self.now()
        self._take(self.mail.take(), begin)
        self.exchange.turn(begin)  # prefilled requests come in, and what was lent comes back
        plan = self._next or self.scheduler.plan()  # who, how many tokens, which pages
        shape, working, self._stopping = await self.lockstep.agree(plan, self._leaving, self._paused)
        self._next = None if working else plan
        if not working:
            self._tell(self.scheduler.flush())
            return
        plan = self.scheduler.settle(plan or self.scheduler.nothing())
        ticket = self.device.launch(plan, shape)
        if self.overlap:
            self._next = self.scheduler.plan()
        drawn = await self.device.collect(ticket)  # the one wait
        outputs = self.scheduler.update(plan, drawn)
        self.exchange.lend(outputs, self.now())
        self._measure(drawn, outputs, self.now() - begin)
        self._tell(outputs)

    def _take(self, messages: list[ToEngine], now: float) -> None:
        for message in messages:
            if isinstance(message, Pause):
                self._paused = message.on
            elif isinstance(message, Bye):
                self.stop()
        self.scheduler.add(self.exchange.sort([m for m in messages if isinstance(m, Ask | Abort)], now))

    def _tell(self, outputs: Outputs) -> None:
        """Tell what there is; and once, when nothing is held any more, that it is so."""
        idle = self.exchange.tick_s is None and not self.scheduler.pages.used
        if outputs or (idle and not self._told_idle):
            outputs.stats.update(self.stats())
            self.mail.put(outputs)
            self._told_idle = idle

    def _measure(self, drawn: Drawn, outputs: Outputs, seconds: float) -> None:
        took = {
            "steps": 1,
            "tokens": len(outputs.tokens),
            "drafted": drawn.drafted,
            "accepted": drawn.accepted,
            "device_seconds": drawn.device_s,
            "host_seconds": seconds - drawn.device_s,
        }
        for name, value in took.items():
            self.sums[name] += value

    def stats(self) -> dict[str, float]:
        """Gauges, and counters since the start, whose names end with ``_total``."""
        s = self.scheduler
        gauges = {"running": len(s.running), "waiting": len(s.waiting), "pages_used": s.pages.used}
        sums = {**s.counts, **self.sums, **self.lockstep.stats()}
        counters = {f"{name}_total": value for name, value in sums.items()}
        return {**gauges, "pages": s.pages.count - 1, **counters, **self.exchange.stats()}
