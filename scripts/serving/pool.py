"""All engines of a model: groups of processes behind one router. It lives as long as one group does."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from scripts import seats
from scripts.build import Settings
from scripts.serving.engine import row_width
from scripts.serving.group import Group, Start, Told
from scripts.serving.groups import berths, pool_config
from scripts.serving.process import Make
from serve.request import Abort, Ask, Outputs, Pause
from serve.router.fleet import Post
from serve.router.router import Router
from serve.wire.codec import Hello

TICK_S = 0.25  # between two looks at who has waited too long


class Engines:
    """``died`` is done, with a reason, when no group is left and none will start again."""

    def __init__(self, s: Settings, config: Path, make: Make, post: str, say: Callable[[str], None]):
        loop, self._say = asyncio.get_running_loop(), say
        self.groups: dict[str, Group] = {}
        self._deliver: Callable[[Outputs], None] = lambda outputs: None
        self._paused = False
        places = berths(s.pools, s.parallel.world)
        seats.check(len(places))
        posts = [Post(b.name, b.group, s.pools[b.pool].role) for b in places]
        configs = {name: pool_config(config, name, pool) for name, pool in s.pools.items()}
        width = row_width(s.parallel)
        starts = [
            Start(b.group, configs[b.pool], make, b.size, width, post, first)
            for first, b in enumerate(places)
            if b.rank == 0
        ]
        front = lambda outputs: self._deliver(outputs)  # noqa: E731
        self.router = Router(posts, s.router, s.serve.page_size, self._to_engine, front, loop.time)
        told = Told(self._joined, self._lost, self.router.deliver)
        self.groups = {start.name: Group(start, s.restart, told) for start in starts}
        self._group_of = {post.name: self.groups[post.group] for post in posts}
        self.died: asyncio.Future[str] = loop.create_future()

    def _to_engine(self, name: str, message: Ask | Abort) -> None:
        self._group_of[name].engine(name).wire.send(message)

    def pause(self, on: bool) -> None:
        """Let no engine take a step, those that start meanwhile included, or let them go on."""
        self._paused = on
        for group in self.groups.values():
            if group.state == "up":
                group.send(Pause(on))

    def _joined(self, group: str) -> None:
        if self._paused:
            self.groups[group].send(Pause())
        if self.groups[group].lives > 1:
            self._say(f"{group} is up again")
        self.router.joined(group)

    def _lost(self, group: str, reason: str) -> None:
        self._say(reason)
        self.router.lost(group, reason)

    def connect(self, deliver: Callable[[Outputs], None]) -> None:
        """``deliver`` gets what is told of the requests that the router was sent."""
        self._deliver = deliver

    async def hello(self) -> Hello:
        """What fits all engines, once every group is up. Raises ValueError where one could not be built."""
        hellos = await asyncio.gather(*(asyncio.shield(g.hello) for g in self.groups.values()))
        return Hello(hellos[0].vocab_size, min(h.context for h in hellos), hellos[0].page_size)

    async def run(self) -> None:
        """Until cancelled. A group that is gone is done without, the last one is told to all."""
        groups = [asyncio.create_task(g.run()) for g in self.groups.values()]
        tick = asyncio.create_task(self._tick())
        try:
            await asyncio.gather(*groups)
            if all(g.gone.done() for g in self.groups.values()):
                reason = "; ".join(dict.fromkeys(g.reason for g in self.groups.values()))
                self.router.give_up(reason)
                self.died.set_result(reason)
        finally:
            for task in (*groups, tick):
                task.cancel()
            await asyncio.gather(*groups, tick, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.router.tick()

    @property
    def malformed(self) -> int:
        return sum(rank.wire.malformed for group in self.groups.values() for rank in group.ranks)

    @property
    def restarts(self) -> int:
        return sum(max(0, group.lives - 1) for group in self.groups.values())

    def health(self) -> dict[str, str]:
        """Each group's state."""
        return {name: group.state for name, group in self.groups.items()}

    def stats(self) -> dict[str, dict[str, float]]:
        """Each engine's latest figures."""
        return {member.name: member.stats for member in self.router.fleet if member.alive}


@asynccontextmanager
async def engine_pools(s: Settings, config: Path, make: Make, say: Callable[[str], None]) -> AsyncIterator[Engines]:
    """The engines of a resolved config file, which ``s`` is built from; all are gone afterwards. ``say`` is told of
    deaths and new lives."""
    with tempfile.TemporaryDirectory(prefix="racklab-") as post:  # mode 0700
        engines = Engines(s, config, make, post, say)
        run = asyncio.create_task(engines.run())
        run.add_done_callback(lambda done: _told(engines, done))
        try:
            yield engines
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


def _told(engines: Engines, done: asyncio.Task) -> None:
    """Our own slip in the care for engines is no reason to go on as if they were there."""
    if not done.cancelled() and done.exception() is not None and not engines.died.done():
        engines.died.set_result(f"{type(done.exception()).__name__}: {done.exception()}")
