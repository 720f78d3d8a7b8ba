"""Playing requests: the record that each leaves, and the plain ways to send them, at given times or so many at once."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from serve.clock import Clock
from serve.load.client import Client, LoadRequest, Usage
from serve.load.theory import Endless


@dataclass(eq=False)
class Record:
    """One request as played; times by the clock. ``usage`` is None while it runs, or if it was cut off at the end."""

    number: int  # in the order of play
    lane: int
    session: str
    turn: int
    warmup: bool
    sent_s: float
    prompt_tokens: int
    max_tokens: int
    reachable_tokens: int  # of the prompt, that an endless cache would hold
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens that came together)
    end_s: float | None = None
    usage: Usage | None = None

    @property
    def ok(self) -> bool:
        return self.usage is not None and self.usage.finish in ("stop", "length")

    @property
    def failed(self) -> bool:
        return self.usage is not None and not self.ok


class Driver:
    """Sends requests and keeps their records. ``on_end`` is called with each that has ended."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        page_size: int,
        max_requests: int | None = None,
        on_end: Callable[[Record], None] | None = None,
    ):
        self.client, self.clock, self.theory = client, clock, Endless(page_size)
        self.records: list[Record] = []
        self.closed = False
        self.full = asyncio.Event()  # set once max_requests were sent
        self._left, self._on_end = max_requests, on_end

    async def send(self, request: LoadRequest) -> Record:
        """Play one request to its end. Warm-up requests do not count towards the limit."""
        record = Record(
            number=len(self.records),
            lane=request.lane,
            session=request.session,
            turn=request.turn,
            warmup=request.warmup,
            sent_s=self.clock.now(),
            prompt_tokens=len(request.tokens),
            max_tokens=request.max_tokens,
            reachable_tokens=self.theory.look(request.tokens),
        )
        self.records.append(record)
        if self._left is not None and not request.warmup:
            self._left -= 1
            if self._left <= 0:
                self.closed = True
                self.full.set()
        record.usage = await self.client.complete(request, lambda at, n: record.arrivals.append((at, n)))
        record.end_s = self.clock.now()
        if self._on_end is not None:
            self._on_end(record)
        return record

    async def within(self, work: asyncio.Task, duration_s: float | None) -> None:
        """Until ``work`` has ended, ``duration_s`` is over, or all requests were sent; nothing starts after that."""
        ends = [work, self.clock.spawn(self.full.wait())]
        if duration_s is not None:
            ends.append(self.clock.spawn(self.clock.sleep(duration_s)))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.closed = True
            for task in ends[1:]:
                task.cancel()

    async def drain(self, tasks: Iterable[asyncio.Task], seconds: float) -> None:
        """Give what is in flight so long to end, then cut it off; the first error of a task is raised."""
        left = [t for t in tasks if not t.done()]
        if left:
            timer = self.clock.spawn(self.clock.sleep(seconds))
            every = self.clock.spawn(_all(left))
            await asyncio.wait([timer, every], return_when=asyncio.FIRST_COMPLETED)
            for task in (timer, every, *left):
                task.cancel()
            await asyncio.gather(timer, every, *left, return_exceptions=True)


async def _all(tasks: list[asyncio.Task]) -> None:
    await asyncio.wait(tasks)


async def open_loop(
    driver: Driver, plan: Iterable[tuple[float, LoadRequest]], duration_s: float | None, drain_s: float
) -> None:
    """Send each request at its time, whatever became of those before it."""
    clock, sent = driver.clock, []

    async def feed() -> None:
        begin = clock.now()
        for at_s, request in plan:
            await clock.sleep(begin + at_s - clock.now())
            if driver.closed:
                return
            sent.append(clock.spawn(driver.send(request)))
            await asyncio.sleep(0)  # it is sent before the next one is looked at
        await asyncio.gather(*sent)

    await _finish(driver, clock.spawn(feed()), sent, duration_s, drain_s)


async def closed_loop(
    driver: Driver, requests: Iterable[LoadRequest], concurrency: int, duration_s: float | None, drain_s: float
) -> None:
    """Keep ``concurrency`` requests in flight as long as there are any."""
    queue = iter(requests)

    async def worker() -> None:
        while not driver.closed and (request := next(queue, None)) is not None:
            await driver.send(request)

    workers = [driver.clock.spawn(worker()) for _ in range(concurrency)]
    await _finish(driver, driver.clock.spawn(_all(workers)), workers, duration_s, drain_s)


async def _finish(
    driver: Driver, work: asyncio.Task, sent: list[asyncio.Task], duration_s: float | None, drain_s: float
) -> None:
    """Wait for the end of the run, then for what is in flight. Raises what a request raised."""
    await driver.within(work, duration_s)
    await driver.drain(sent, drain_s)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    for task in sent:
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()
