"""The engine processes of a plan, one a rank, as one engine: each request goes to the rank with the fewest open."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from parallel.agree import node
from parallel.mesh import Seat
from scripts.serving.process import EngineProcess, Make, engine_process
from serve.lockstep import WIDTH
from serve.request import Abort, Ask, Outputs
from serve.wire.codec import Hello


class Pool:
    """As `EngineProcess`. Ranks share every step, so that the death of one ends all."""

    def __init__(self, ranks: list[EngineProcess]):
        self._ranks = ranks
        self._open = [0] * len(ranks)
        self._rank_of: dict[int, int] = {}
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for rank, engine in enumerate(ranks):
            engine.died.add_done_callback(lambda done, rank=rank: self._gone(rank, done.result()))

    def _gone(self, rank: int, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason if len(self._ranks) == 1 else f"rank {rank}: {reason}")

    @property
    def malformed(self) -> int:
        return sum(r.wire.malformed for r in self._ranks)

    async def hello(self) -> Hello:
        """What all ranks say when they are ready. Raises ValueError where one could not be built."""
        return (await asyncio.gather(*(r.hello() for r in self._ranks)))[0]

    def send(self, message: Ask | Abort) -> None:
        if isinstance(message, Ask):
            rank = min(range(len(self._ranks)), key=self._open.__getitem__)
            self._rank_of[message.handle] = rank
            self._open[rank] += 1
        else:
            rank = self._rank_of.get(message.handle)
        if rank is not None:
            self._ranks[rank].wire.send(message)

    async def pump(self, deliver: Callable[[Outputs], None]) -> None:
        """Hand outputs on until cancelled."""

        def note(outputs: Outputs) -> None:
            for finish in outputs.finished:
                rank = self._rank_of.pop(finish.handle, None)
                if rank is not None:
                    self._open[rank] -= 1
            deliver(outputs)

        await asyncio.gather(*(r.pump(note) for r in self._ranks))

    async def end(self) -> None:
        await asyncio.gather(*(r.end() for r in self._ranks))


@asynccontextmanager
async def engine_pool(config: Path, make: Make, size: int, width: int = WIDTH) -> AsyncIterator[Pool]:
    """``size`` processes, each with its seat; all are gone afterwards. ``width``: of the rows by which they agree."""
    with tempfile.TemporaryDirectory(prefix="racklab-") as folder:
        board = node.create(size, width)
        async with AsyncExitStack() as stack:
            seats = [Seat(rank, size, os.path.join(folder, "ranks"), board.address) for rank in range(size)]
            pool = Pool([await stack.enter_async_context(engine_process(config, make, seat)) for seat in seats])
            try:
                yield pool
            finally:
                await pool.end()
