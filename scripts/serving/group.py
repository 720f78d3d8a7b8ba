"""A group of engine processes that share every step, in one life after another: they die together, and start again."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallel.agree import node
from parallel.mesh import Seat
from scripts.seats import seat as torchrun_seat
from scripts.serving import torchrun
from scripts.serving.process import EngineProcess, Make, engine_process
from serve.request import Outputs, Pause
from serve.wire.codec import Hello

LAST_WORDS_S = 0.1  # for what a dead engine sent to arrive
STEADY_S = 60.0  # a life so long makes up for the deaths before it
LONGEST_S = 60.0  # between two lives
BUILDS = 2  # lives in a row that were never built, after which there is no other


@dataclass(frozen=True)
class Restart:
    """What `serve.restart` says. ``pause_s`` before a group that died starts again, twice as long with each death in a
    row. ``silent_s``: an engine that does not come to the end of a step for so long is killed; None: never. So is one
    that is not ready ``build_s`` after its start."""

    enabled: bool = True
    pause_s: float = 1.0
    silent_s: float | None = 300.0
    build_s: float = 3600.0

    def __post_init__(self):
        if not 0 <= self.pause_s <= LONGEST_S:
            raise ValueError(f"serve.restart.pause_s must be 0 to {LONGEST_S:g} seconds, got {self.pause_s}")
        if not 0 < self.build_s < 1e9:
            raise ValueError(f"serve.restart.build_s must be > 0 seconds, got {self.build_s}")
        if self.silent_s is not None and not 0 < self.silent_s < 1e9:
            raise ValueError(f"serve.restart.silent_s must be > 0 seconds, or null for never, got {self.silent_s}")


@dataclass(frozen=True)
class Start:
    """How to start a group: ``width`` of the rows by which its ranks agree, ``post`` the folder of all letter boxes,
    ``first`` the number of its first rank among the engines of all groups."""

    name: str
    config: Path
    make: Make
    size: int
    width: int
    post: str
    first: int = 0


@dataclass(frozen=True)
class Told:
    """Whom a group tells of itself."""

    joined: Callable[[str], None]
    lost: Callable[[str, str], None]
    outputs: Callable[[str, Outputs], None]


class Group:
    """``state``: starting, up, down (between two lives) or gone; ``reason``: of the latest death."""

    def __init__(self, start: Start, restart: Restart, told: Told):
        self.start, self.restart, self._told = start, restart, told
        self.state, self.reason, self.lives = "starting", "", 0
        self.ranks: list[EngineProcess] = []
        self.hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        return self.start.name

    def engine(self, name: str) -> EngineProcess:
        return self.ranks[int(name.rpartition(".")[2])]

    def send(self, message: Pause) -> None:
        """To every rank."""
        for rank in self.ranks:
            rank.wire.send(message)

    async def run(self) -> None:
        """Live until cancelled, or until there is no other life. A first life that cannot be built is told by `hello`
        alone."""
        deaths = unbuilt = 0
        while unbuilt < BUILDS:
            began = asyncio.get_running_loop().time()
            self.state, self.lives = "starting", self.lives + 1
            built = await self._life()
            if not self.hello.done():
                return self.hello.set_exception(ValueError(self.reason))
            unbuilt = 0 if built else unbuilt + 1
            deaths = 1 if asyncio.get_running_loop().time() - began > STEADY_S else deaths + 1
            if not self.restart.enabled:
                break
            self.state = "down"
            await asyncio.sleep(min(LONGEST_S, self.restart.pause_s * 2 ** min(deaths - 1, 10)))
        self.state = "gone"
        self.gone.set_result(self.reason)

    async def _life(self) -> bool:
        """From the start of its processes to their end; whether it could be built. `reason` says why it ended."""
        async with self._processes() as self.ranks:
            try:
                async with asyncio.timeout(self.restart.build_s):
                    hellos = await asyncio.gather(*(rank.hello() for rank in self.ranks))
            except (ValueError, TimeoutError) as error:
                late = f"{self.name} was not ready {self.restart.build_s:g} s after its start (serve.restart.build_s)"
                self.reason = str(error) or late
                await asyncio.gather(*(rank.kill() for rank in self.ranks))
                return False
            if not self.hello.done():
                self.hello.set_result(hellos[0])
            self.state = "up"
            self._told.joined(self.name)
            self.reason = await self._serve()
            self.state = "down"
            self._told.lost(self.name, self.reason)
            await asyncio.gather(*(rank.kill() for rank in self.ranks))
            return True

    async def _serve(self) -> str:
        """Hand outputs on until a rank dies; which one, and why."""
        tasks = []
        for i, rank in enumerate(self.ranks):
            deliver = partial(self._told.outputs, f"{self.name}.{i}")
            tasks.append(asyncio.create_task(rank.pump(deliver)))
            if self.restart.silent_s is not None:
                tasks.append(asyncio.create_task(rank.watch(self.restart.silent_s)))
        try:
            await asyncio.wait([rank.died for rank in self.ranks], return_when=asyncio.FIRST_COMPLETED)
            rank = next(i for i, rank in enumerate(self.ranks) if rank.died.done())
            await asyncio.sleep(LAST_WORDS_S)
            return f"{self.name}.{rank}: {self.ranks[rank].died.result()}"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def _processes(self) -> AsyncIterator[list[EngineProcess]]:
        """A process for each rank, with what they meet by; all are gone afterwards."""
        s = self.start
        with tempfile.TemporaryDirectory(prefix="racklab-") as folder:
            board = node.create(s.size, s.width)
            where = (os.path.join(folder, "ranks"), board.address)
            async with AsyncExitStack() as stack:
                mine = [{"number": s.first + rank, "name": f"{s.name}.{rank}"} for rank in range(s.size)]
                seats = [Seat(rank, s.size, *where, post=s.post, **who) for rank, who in enumerate(mine)]
                if torchrun_seat().size > 1:  # the others are started already; the first of all is beside us
                    ranks = [torchrun.remote_engine(s.first + rank) for rank in range(s.size)]
                    if s.first == 0:
                        own = torchrun.engine_seat(s.name, 0, s.size)
                        ranks[0] = engine_process(s.config, s.make, own)
                else:
                    ranks = [engine_process(s.config, s.make, seat) for seat in seats]
                made = [await stack.enter_async_context(rank) for rank in ranks]
                try:
                    yield made
                finally:
                    await asyncio.gather(*(rank.end() for rank in made))
