"""The engine's own process: compiled CPU code holds the interpreter's lock, and HTTP must not wait for it."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from parallel import mesh
from parallel.mesh import Seat
from serve.request import Bye
from serve.wire.codec import Failed, Hello, Ping, Pong
from serve.wire.pair import EngineWire, FrontWire

END_S = 10.0  # for an engine that was told to end, before it is killed
LOOKS = 4  # at a silent engine, before it counts as dead: time in which this process did not run is not held against it

# (resolved config file, its side of the wire, its seat) -> an engine with `async run(pause)`, and what fits it. A
# function that a new process can import.
Make = Callable[[Path, EngineWire, Seat], tuple[Any, Hello]]


def engine_main(config: Path, address: str, make: Make, seat: Seat) -> None:
    """The process: build, say hello, run until told to end. An exception is told to the other side, then raised."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a signal to the whole group is for the HTTP process, which drains
    if multiprocessing.parent_process() is not None:  # else torchrun watches
        threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout = sys.stderr  # stdout belongs to the result
    wire = EngineWire(address)
    try:
        engine, hello = make(config, wire, seat)
        wire.put(hello)
        asyncio.run(engine.run(lambda: asyncio.sleep(0)))
    except Exception as error:
        if not isinstance(error, (ValueError, OSError)):
            traceback.print_exc()
        wire.put(Failed(f"{type(error).__name__}: {error}", isinstance(error, (ValueError, OSError))))
        raise SystemExit(1) from None
    finally:
        mesh.leave()
        wire.close()


def engine_process_main(config: Path, address: str, make: Make, seat: Seat) -> None:
    """`engine_main` in a process of its own, which ends at once: to take libraries down by their own rules lasts longer
    than the HTTP process waits, and what must be left in order is closed by then."""
    code = 0
    try:
        engine_main(config, address, make, seat)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


class EngineProcess:
    """A running engine process as the HTTP process sees it. ``died`` is done, with a reason, when it is gone."""

    def __init__(self, process: multiprocessing.Process, wire: FrontWire):
        self._process, self.wire = process, wire
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reason = ""
        self._built = False
        self._pong = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._gone)

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        if not self.died.done():
            told = self._reason or f"exit code {self._process.exitcode}"
            self.died.set_result(f"the engine process is gone ({told})")

    async def hello(self) -> Hello:
        """What it says when it is ready. Raises ValueError where it could not be built."""
        first = asyncio.create_task(self.wire.receive())
        try:
            await asyncio.wait([first, self.died], return_when=asyncio.FIRST_COMPLETED)
            message = first.result() if first.done() else None
        finally:
            first.cancel()
        if isinstance(message, Hello):
            self._built = True
            return message
        if isinstance(message, Failed):
            raise ValueError(message.message.partition(": ")[2] if message.users else message.message)
        raise ValueError(self.died.result())

    async def pump(self, deliver: Callable) -> None:
        """Hand outputs on until cancelled; remember why it failed, if it says so."""

        def sort(message) -> None:
            if isinstance(message, Failed):
                self._reason = message.message
            elif isinstance(message, Pong):
                self._pong.set()
            else:
                deliver(message)

        await self.wire.pump(sort)

    async def watch(self, silent_s: float) -> None:
        """Kill it when it does not answer for ``silent_s`` between two steps: it hangs, or was stopped."""
        while True:
            self._pong.clear()
            self.wire.send(Ping())
            for _ in range(LOOKS):
                await asyncio.sleep(silent_s / LOOKS)
                if self._pong.is_set():
                    break
            else:
                self._reason = self._reason or f"no sign of life for {silent_s:g} s"
                return self._process.kill()

    async def kill(self) -> None:
        if not self.died.done():
            self._process.kill()
            await asyncio.wait([self.died])

    async def end(self) -> None:
        """Tell it to end; kill it if it does not, or is still being built."""
        if not self.died.done() and self._built:
            self.wire.send(Bye())
            await asyncio.wait([self.died], timeout=END_S)
        await self.kill()


@asynccontextmanager
async def engine_process(config: Path, make: Make, seat: Seat) -> AsyncIterator[EngineProcess]:
    """A process started by spawn, with its socket in a private folder; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="racklab-") as folder:  # mode 0700
        address = f"ipc://{folder}/engine"
        wire = FrontWire(address)
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=engine_process_main, args=(config, address, make, seat), name=seat.name, daemon=True
        )
        process.start()
        engine = EngineProcess(process, wire)
        try:
            yield engine
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await engine.end()
            wire.close()
