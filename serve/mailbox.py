"""The queue pair between a front end and an engine of the same process (between two: serve/wire/pair.py).

The engine sees `take`, `wait` and `put`; the front end sees `send` and is called with each `Outputs`.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from serve.request import Outputs, ToEngine


class Mailbox:
    """``deliver(outputs)`` is called on the engine's thread, which is the front end's event loop here."""

    def __init__(self, deliver: Callable[[Outputs], None]):
        self._deliver = deliver
        self._waiting: list[ToEngine] = []
        self._arrived = asyncio.Event()
        self._watched: list[int] = []

    def watch(self, fd: int) -> None:
        """Let `wait` return when ``fd`` is readable, too."""
        self._watched.append(fd)

    def send(self, message: ToEngine) -> None:
        self._waiting.append(message)
        self._arrived.set()

    def take(self) -> list[ToEngine]:
        """Everything sent since the last call, in order."""
        taken, self._waiting = self._waiting, []
        self._arrived.clear()
        return taken

    async def wait(self, timeout: float | None = None) -> None:
        """Return once there is something to take, or after ``timeout`` seconds."""
        for fd in self._watched:
            asyncio.get_running_loop().add_reader(fd, self._arrived.set)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout)
        for fd in self._watched:
            asyncio.get_running_loop().remove_reader(fd)

    def put(self, outputs: Outputs) -> None:
        self._deliver(outputs)
