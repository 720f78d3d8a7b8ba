"""Ranks that torchrun started. The first runs the script, with an engine process beside it; every other is an engine.

Ranks go to the groups of engines in order. Where the first listens for each rank, and where each takes its letters, is
told in torchrun's store. That network is trusted, as gloo and NCCL trust it.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from parallel.mesh import Seat
from scripts import seats
from scripts.serving.groups import Pool, berths, pool_config
from scripts.serving.process import EngineProcess, Make, engine_main
from serve.request import Bye
from serve.wire.codec import Failed, Pong
from serve.wire.pair import FrontWire

MEET_S = 300.0  # for the first rank to say where it listens


def _store() -> dist.Store:
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=MEET_S))


def _key(what: str) -> str:
    return f"racklab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}"


def engine_seat(group: str, rank: int, size: int) -> Seat:
    """That of one engine among those of its group, which meet in a part of the store that is theirs."""
    where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/{_key(group)}"
    return Seat(rank, size, where, name=f"{group}.{rank}")


def serve(pools: Mapping[str, Pool], world: int, config: Path, make: Make) -> None:
    """Be the engine of this rank, which is not the first, until it is told to end."""
    places, here = berths(pools, world), seats.seat().rank
    seats.check(len(places))
    mine = places[here]
    written, seat = pool_config(config, mine.pool, pools[mine.pool]), engine_seat(mine.group, mine.rank, mine.size)
    engine_main(written, _store().get(_key(f"front/{here}")).decode(), make, seat)


class Inboxes:
    """Where engines on other machines take their letters (as serve/wire/net.py wants it)."""

    def __init__(self):
        self._store = _store()

    def bind(self, engine: str) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: asks for the way there
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            return f"tcp://{probe.getsockname()[0]}:*"

    def bound(self, engine: str, address: str) -> None:
        self._store.set(_key(f"inbox/{engine}"), address)

    def find(self, engine: str) -> str:
        key = _key(f"inbox/{engine}")
        if not self._store.check([key]):
            raise ValueError(f"engine {engine} has not said where it takes letters")
        return self._store.get(key).decode()


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
    _store().set(_key(f"front/{rank}"), wire.address)
    try:
        yield RemoteEngine(wire)
    finally:
        wire.close()
