"""A whole HTTP server of one event loop: a fake engine, its front end, and uvicorn on a free port."""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from scripts.bytetext import ByteText
from serve.api.app import create_app
from serve.api.listen import bind, listen
from serve.api.service import Behind, Offer, Ports, Service
from serve.front import Bounds, Front
from serve.mailbox import Mailbox
from serve.metrics import Metrics
from serve.request import Pause
from serve.text import Text
from tests.serve.fake import FakeEngine, script

BOUNDS = Bounds(vocab_size=512, context=512, page_size=16, max_waiting=64, max_prompt_tokens=1 << 16)
BYTES = ByteText(512, 0, 1)
ANSWER = "Hello, world. "


@dataclass
class Served:
    url: str
    service: Service
    engine: Any  # a FakeEngine, or a real one
    port: int

    @property
    def offer(self) -> Offer:
        return self.service.offers[0]

    @property
    def front(self) -> Front:
        return self.offer.front

    async def raw(self, request: bytes) -> bytes:
        """What the server answers to these bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer


def make(
    answer=ANSWER,
    text: ByteText | Text = BYTES,
    bounds: Bounds = BOUNDS,
    engine: dict | None = None,
    build: Callable | None = None,
    name: str = "tiny",
    metrics: Metrics | None = None,
    more: Sequence[Offer] = (),
    **service,
):
    """A service and its engine, not yet running: a fake one, or that of ``build(mailbox)``. ``more``: other models."""
    metrics, ids = metrics or Metrics(), itertools.count()
    mine = metrics.model(name)
    bounds = replace(bounds, vocab_size=text.vocab_size)
    front = Front(bounds, time.monotonic, text.stream, mine)
    mailbox = Mailbox(front.deliver)
    front.connect(mailbox.send)
    answer = script(answer, text.encode) if isinstance(answer, str) else answer
    behind = build(mailbox) if build else FakeEngine(mailbox, answer, **(engine or {}))
    pause = lambda on: mailbox.send(Pause(on))  # noqa: E731
    behind_it = Behind(engines=lambda: {"engine0.0": front.stats}, pause=pause)
    ports = Ports(lambda: 1.0, lambda: str(next(ids)), lambda: 7)
    offer = Offer(name, front, text, mine, behind_it)
    made = Service((offer, *more), metrics, ports, **service)
    return made, behind


@asynccontextmanager
async def serve(*args, clean: bool = True, **how) -> AsyncIterator[Served]:
    """A running server; ``clean``: in the end nothing may be open."""
    service, engine = make(*args, **how)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    stop = asyncio.Event()
    turn = lambda: asyncio.sleep(0)  # noqa: E731
    tasks = [asyncio.create_task(engine.run(turn)), asyncio.create_task(listen(create_app(service), sock, stop, 1))]
    await reachable(port)
    try:
        yield Served(f"http://127.0.0.1:{port}", service, engine, port)
        if clean:
            front = service.offers[0].front
            await asyncio.wait_for(front.idle(), 5)
            assert not getattr(engine, "running", None) and front.waiting == 0 and front.prompt_tokens == 0
    finally:
        stop.set()
        tasks[0].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)


async def reachable(port: int) -> None:
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        await asyncio.sleep(0.01)


def run(test: Callable, seconds: float = 60) -> None:
    """Run ``async def test()``, with an end."""

    async def go():
        async with asyncio.timeout(seconds):
            await test()

    asyncio.run(go())
