"""Ranks that torchrun started. The first runs the script, with an engine process beside it; every other is an engine.

The first tells where it listens for each rank in torchrun's store. That network is trusted, as gloo and NCCL trust it.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from scripts import seats
from scripts.serving.process import EngineProcess, Make, engine_main
from serve.request import Bye
from serve.wire.codec import Failed, Pong
from serve.wire.pair import FrontWire

MEET_S = 300.0  # for the first rank to say where it listens


def _store() -> dist.Store:
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=MEET_S))


def _key(rank: int) -> str:
    return f"racklab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/front/{rank}"


def serve(config: Path, make: Make) -> None:
    """Be the engine of this rank, which is not the first, until it is told to end."""
    here = seats.seat()
    engine_main(config, _store().get(_key(here.rank)).decode(), make, here)


@dataclass(frozen=True)
class Elsewhere:
    """A process that torchrun watches and ends with all others if one of them dies; here it counts as dead once it says
    so, or is given up."""

    died: asyncio.Future[str]

    def kill(self) -> None:
        self.gone("it was given up")

    def gone(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(f"the engine process is gone ({reason})")


class RemoteEngine(EngineProcess):
    """The engine of another rank."""

    def __init__(self, wire: FrontWire):
        self.wire, self._reason, self._built, self._pong = wire, "", False, asyncio.Event()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._process = Elsewhere(self.died)

    async def pump(self, deliver: Callable) -> None:
        def sort(message) -> None:
            if isinstance(message, Failed):
                self._process.gone(message.message)
            elif isinstance(message, Pong):
                self._pong.set()
            else:
                deliver(message)

        await self.wire.pump(sort)

    async def end(self) -> None:
        """Tell it to end; torchrun waits for it."""
        self.wire.send(Bye())


@asynccontextmanager
async def remote_engine(rank: int) -> AsyncIterator[RemoteEngine]:
    """The first rank's side of the engine of ``rank``."""
    wire = FrontWire(f"tcp://{socket.gethostbyname(os.environ['MASTER_ADDR'])}:*")
    _store().set(_key(rank), wire.address)
    try:
        yield RemoteEngine(wire)
    finally:
        wire.close()
