"""Serve models over HTTP to OpenAI's clients: `python -m scripts.server api.port=8000`. Ends on SIGTERM or Ctrl-C,
after what it has accepted; the result line is last.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from parallel.mesh import Seat
from scripts import build, report, seats
from scripts.build import Settings
from scripts.entry import entry
from scripts.serving import engine as serving
from scripts.serving import torchrun
from scripts.serving.models import ServedModel, models_of
from scripts.serving.pool import Engines, engine_pools
from scripts.serving.process import Make
from serve.api.app import create_app
from serve.api.listen import bind, listen
from serve.api.service import Behind, Offer, Ports, Service
from serve.front import Bounds, Front
from serve.metrics import Metrics
from serve.rehearse import rehearse
from serve.wire.codec import Hello
from serve.wire.pair import EngineWire

REHEARSED_ROWS = 4096  # larger steps are rare enough to be met unrehearsed
ABORT_S = 5.0  # for the engine to confirm aborts, and for clients to take their last words


def make_engine(config: Path, wire: EngineWire, seat: Seat) -> tuple[Any, Hello]:
    """In the engine's process: the engine of a resolved config, and what fits it."""
    s = build.build_settings(OmegaConf.load(config))
    s = replace(s, device=seats.device(s.device, seat))
    engine, text = serving.build_engine(s, wire, seat)
    alone = seat.size == 1  # ranks would wait for each other at every step
    if s.serve.rehearse and alone and engine.device.runner.device.type == "cpu":
        rows = min(s.serve.budget_tokens, s.serve.pages * s.serve.page_size, REHEARSED_ROWS)
        rehearse(engine.device.runner, rows, min(s.serve.max_batch, rows), s.speculate)
    return engine, Hello(text.vocab_size, engine.scheduler.limits.context, s.serve.page_size)


def run(s: Settings, make: Make = make_engine) -> dict | None:
    if seats.seat().rank:
        return torchrun.serve(s.pools, s.parallel.world, report.run_folder() / "config.yaml", make)
    return asyncio.run(serve(s, report.run_folder(), make))


async def serve(s: Settings, folder: Path, make: Make) -> dict:
    """Start, serve, drain. ``folder`` holds the resolved config.yaml. Raises ValueError for what cannot be served."""
    key, stops = s.api.key(), asyncio.Queue()
    served = models_of(s, folder / "config.yaml")
    texts = [build.build_text(m.settings, build.checkpoint_config(m.settings)) for m in served]
    sock = bind(s.api.host, s.api.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stops.put_nowait, number)
    started, metrics = time.monotonic(), Metrics()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine_pools(m.settings, m.config, make, say)) for m in served]
        hellos = await ready(engines, stops)
        offers = tuple(map(partial(offer_of, s, metrics), served, texts, hellos or (), engines))
        if not offers:
            return result(offers, engines, started)
        end = asyncio.Event()
        app = create_app(service_of(s, offers, metrics, key))
        tasks = [asyncio.create_task(watch(e, o)) for e, o in zip(engines, offers, strict=True)]
        tasks.append(asyncio.create_task(listen(app, sock, end, ABORT_S)))
        announce(s, sock.getsockname()[1], offers[0].name, folder)
        await next_stop(stops, tasks[-1])
        await drain([offer.front for offer in offers], stops, s.api.drain_s)
        end.set()
        await tasks[-1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return result(offers, engines, started)


def offer_of(s: Settings, metrics: Metrics, model: ServedModel, text: Any, hello: Hello, engines: Engines) -> Offer:
    """A model whose engines are up, with its front end."""
    waiting = model.settings.serve.max_waiting
    bounds = Bounds(hello.vocab_size, hello.context, hello.page_size, waiting, s.api.max_prompt_tokens)
    mine = metrics.model(model.name)
    front = Front(bounds, time.monotonic, text.stream, mine)
    front.connect(engines.router.send)
    engines.connect(front.deliver)
    behind = Behind(engines.health, engines.stats, engines.router.stats, engines.pause)
    return Offer(model.name, front, text, mine, behind)


def service_of(s: Settings, offers: tuple[Offer, ...], metrics: Metrics, key: str | None) -> Service:
    chance = random.SystemRandom()
    ports = Ports(time.time, lambda: uuid.uuid4().hex, lambda: chance.getrandbits(62))
    limits = {"max_body_bytes": s.api.max_body_mb << 20, "body_timeout_s": s.api.body_timeout_s}
    return Service(offers, metrics, ports, key, chat_tokens=s.api.chat_tokens, **limits)


async def ready(engines: list[Engines], stops: asyncio.Queue) -> list[Hello] | None:
    """What the engines of each model say when they are built; None if a signal comes first."""
    hellos, stop = asyncio.gather(*(e.hello() for e in engines)), asyncio.create_task(stops.get())
    await asyncio.wait([hellos, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if hellos.done():
        return hellos.result()
    hellos.cancel()
    return None


async def next_stop(stops: asyncio.Queue, server: asyncio.Task) -> None:
    """Return on a signal. Raises what the HTTP server raises if it ends by itself."""
    stop = asyncio.create_task(stops.get())
    await asyncio.wait([stop, server], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if server.done():
        await server
        raise OSError("the HTTP server ended by itself")


async def watch(engines: Engines, offer: Offer) -> None:
    """When no engine of a model is left, every open request is told."""
    offer.front.fail(await asyncio.shield(engines.died))


async def drain(fronts: list[Front], stops: asyncio.Queue, seconds: float) -> None:
    """Take nothing more, finish what was accepted, abort what is left after ``seconds`` or a second signal."""
    for front in fronts:
        if not front.failed:
            front.close("the server is shutting down")
    say(f"draining: {sum(f.open for f in fronts)} open")
    idle, again = asyncio.gather(*(f.idle() for f in fronts)), asyncio.create_task(stops.get())
    await asyncio.wait([idle, again], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not idle.done():
        say(f"aborting {sum(f.open for f in fronts)}")
        for front in fronts:
            front.abort_all("the server has shut down")
        await asyncio.wait([idle], timeout=ABORT_S)
    for front in fronts:
        if front.open:
            front.fail("the server has shut down")
    idle.cancel()


def announce(s: Settings, port: int, model: str, folder: Path) -> None:
    """Say where the server listens: on stderr, and in server.json for programs."""
    host = f"[{s.api.host}]" if ":" in s.api.host else s.api.host
    url = f"http://{host}:{port}"
    about = {"url": url, "host": s.api.host, "port": port, "pid": os.getpid(), "model": model}
    part = folder / "server.json.part"
    part.write_text(json.dumps(about) + "\n", encoding="utf-8")
    part.rename(folder / "server.json")
    say(f"listening on {url}")


def say(line: str) -> None:
    with suppress(BrokenPipeError):
        print(line, file=sys.stderr, flush=True)


def result(offers: Sequence[Offer], engines: list[Engines], started: float) -> dict:
    """``restarts``: of groups of engines; ``failed``: models of which no engine was left."""
    sums = Counter()
    for offer in offers:
        sums.update(offer.metrics.totals)
        sums.update(offer.metrics.finishes)
    return {
        "requests": sums["requests"],
        "tokens": sums["completion_tokens"],
        "prompt_tokens": sums["prompt_tokens"],
        "cached_tokens": sums["cached_tokens"],
        "completed": sums["stop"] + sums["length"],
        "aborted": sums["abort"],
        "errors": sums["error"],
        "malformed": sum(e.malformed for e in engines),
        "restarts": sum(e.restarts for e in engines),
        "failed": sum(e.died.done() for e in engines),
        "seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    entry(run)
