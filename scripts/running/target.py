"""Where requests go: an engine of this process, pools of engines in processes of their own, or a server."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial

from scripts import report
from scripts.build import Settings
from scripts.server import make_engine, say
from scripts.serving import engine as serving
from scripts.serving.groups import ONE
from scripts.serving.pool import Engines, engine_pools
from serve.clock import Clock
from serve.load.client import Client, HttpClient, LocalClient
from serve.request import Outputs

ENGINE = "engine"
TURNS = 8  # of the event loop between two steps: from a timer that rings to a request sent takes five


async def turns() -> None:
    """Let everyone else on the loop go on as far as they can without waiting."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Engine:
    """An engine at work beside whatever drives it."""

    def __init__(self, client: LocalClient, work: asyncio.Task):
        self.client, self.work = client, work

    async def beside(self, play: Coroutine) -> None:
        """Run ``play`` to its end. Raises what the engine raised if that ends first."""
        task = asyncio.ensure_future(play)
        await asyncio.wait([task, self.work], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.work.result()
            raise RuntimeError("the engine stopped while requests were in flight")
        task.result()


class Server:
    """A server elsewhere."""

    def __init__(self, client: Client):
        self.client = client

    async def beside(self, play: Coroutine) -> None:
        await play


@asynccontextmanager
async def pools(s: Settings, clock: Clock) -> AsyncIterator[Engine]:
    """Engine processes of all pools behind a router, one for each rank: ours, or on other machines torchrun's."""
    client = LocalClient(clock, s.serve.page_size)
    async with engine_pools(s, report.run_folder() / "config.yaml", make_engine, say) as engines:
        await engines.hello()
        client.mailbox = engines.router
        engines.connect(partial(told, client, engines))
        work = asyncio.ensure_future(gone(engines))
        try:
            yield Engine(client, work)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


def told(client: LocalClient, engines: Engines, outputs: Outputs) -> None:
    """With the sums of all engines' figures, of which the card makes the split of a step."""
    outputs.stats.update(engines.router.stats())
    client.deliver(outputs)


async def gone(engines: Engines) -> None:
    """Raises OSError when no engine is left."""
    raise OSError(await asyncio.shield(engines.died))


@asynccontextmanager
async def connect(s: Settings, clock: Clock) -> AsyncIterator[Engine | Server]:
    """The target of ``target=``. Raises ValueError for one there is not."""
    if s.target.startswith(("http://", "https://")):
        async with HttpClient(s.target, clock) as client:
            yield Server(client)
    elif s.target == ENGINE and (s.parallel.world > 1 or s.pools != ONE):
        async with pools(s, clock) as target:
            yield target
    elif s.target == ENGINE:
        client = LocalClient(clock, s.serve.page_size)
        engine, _ = serving.build_engine(s, client.mailbox)
        work = asyncio.ensure_future(engine.run(turns))
        try:
            yield Engine(client, work)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    else:
        raise ValueError(f"target must be {ENGINE} or http://HOST:PORT, got {s.target!r}")
