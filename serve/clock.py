"""The clock port: what time it is, waiting, and tasks. The real one is the event loop's; a simulated one is an event
loop of its own, so what runs on this port may use asyncio's futures and events."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol


class Clock(Protocol):
    def now(self) -> float: ...  # seconds, from any origin

    async def sleep(self, seconds: float) -> None: ...

    def spawn(self, work: Coroutine) -> asyncio.Task: ...


class LoopClock:
    """The running loop's time, which other threads may ask for too."""

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None

    def now(self) -> float:
        return self._running().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task:
        return self._running().create_task(work)

    def _running(self) -> asyncio.AbstractEventLoop:
        """The loop of the first call, which must be made on its thread."""
        self._loop = self._loop or asyncio.get_running_loop()
        return self._loop
