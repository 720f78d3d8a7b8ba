"""Serve a model over HTTP to OpenAI's clients: `python -m scripts.server api.port=8000`. Ends on SIGTERM or Ctrl-C,
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from parallel.mesh import Seat
from scripts import build, report
from scripts.build import Settings
from scripts.entry import entry
from scripts.serving import engine as serving
from scripts.serving.pool import Pool, engine_pool
from scripts.serving.process import Make
from serve.api.app import Ports, Service, create_app
from serve.api.listen import bind, listen
from serve.front import Bounds, Front
from serve.metrics import Metrics
from serve.wire.codec import Hello
from serve.wire.pair import EngineWire

ABORT_S = 5.0  # for the engine to confirm aborts, and for clients to take their last words


def make_engine(config: Path, wire: EngineWire, seat: Seat) -> tuple[Any, Hello]:
    """In the engine's process: the engine of a resolved config, and what fits it."""
    s = build.build_settings(OmegaConf.load(config))
    engine, text = serving.build_engine(s, wire, seat)
    return engine, Hello(text.vocab_size, engine.scheduler.limits.context, s.serve.page_size)


def run(s: Settings, make: Make = make_engine) -> dict:
    return asyncio.run(serve(s, report.run_folder(), make))


async def serve(s: Settings, folder: Path, make: Make) -> dict:
    """Start, serve, drain. ``folder`` holds the resolved config.yaml. Raises ValueError for what cannot be served."""
    key, stops = s.api.key(), asyncio.Queue()
    text = build.build_text(s, build.checkpoint_config(s))
    sock = bind(s.api.host, s.api.port)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stops.put_nowait, number)
    started = time.monotonic()
    async with engine_pool(folder / "config.yaml", make, s.parallel.world, serving.row_width(s.parallel)) as engine:
        hello = await ready(engine, stops)
        if hello is None:
            return result(Metrics(), engine, started)
        service = service_of(s, text, hello, key)
        service.front.connect(engine.send)
        end = asyncio.Event()
        tasks = [
            asyncio.create_task(engine.pump(service.front.deliver)),
            asyncio.create_task(watch(engine, service.front)),
            asyncio.create_task(listen(create_app(service), sock, end, ABORT_S)),
        ]
        announce(s, sock.getsockname()[1], service.model, folder)
        await next_stop(stops, tasks[-1])
        await drain(service.front, stops, s.api.drain_s)
        end.set()
        await tasks[-1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return result(service.metrics, engine, started)


def service_of(s: Settings, text: Any, hello: Hello, key: str | None) -> Service:
    bounds = Bounds(hello.vocab_size, hello.context, hello.page_size, s.serve.max_waiting, s.api.max_prompt_tokens)
    metrics, chance = Metrics(), random.SystemRandom()
    ports = Ports(time.time, lambda: uuid.uuid4().hex, lambda: chance.getrandbits(62))
    return Service(
        front=Front(bounds, time.monotonic, text.stream, metrics),
        text=text,
        model=s.api.model or Path(s.checkpoint).name,
        metrics=metrics,
        ports=ports,
        key=key,
        max_body_bytes=s.api.max_body_mb << 20,
        body_timeout_s=s.api.body_timeout_s,
        chat_tokens=s.api.chat_tokens,
    )


async def ready(engine: Pool, stops: asyncio.Queue) -> Hello | None:
    """What the engine says when it is built; None if a signal comes first."""
    hello, stop = asyncio.create_task(engine.hello()), asyncio.create_task(stops.get())
    await asyncio.wait([hello, stop], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if hello.done():
        return hello.result()
    hello.cancel()
    return None


async def next_stop(stops: asyncio.Queue, server: asyncio.Task) -> None:
    """Return on a signal. Raises what the HTTP server raises if it ends by itself."""
    stop = asyncio.create_task(stops.get())
    await asyncio.wait([stop, server], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if server.done():
        await server
        raise OSError("the HTTP server ended by itself")


async def watch(engine: Pool, front: Front) -> None:
    """When the engine dies, every open request is told."""
    reason = await asyncio.shield(engine.died)
    await asyncio.sleep(0.1)  # for its last words to arrive
    say(reason)
    front.fail(reason)


async def drain(front: Front, stops: asyncio.Queue, seconds: float) -> None:
    """Take nothing more, finish what was accepted, abort what is left after ``seconds`` or a second signal."""
    if not front.failed:
        front.close("the server is shutting down")
    say(f"draining: {front.open} open")
    idle, again = asyncio.create_task(front.idle()), asyncio.create_task(stops.get())
    await asyncio.wait([idle, again], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not idle.done():
        say(f"aborting {front.open}")
        front.abort_all()
        await asyncio.wait([idle], timeout=ABORT_S)
    if not idle.done():
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


def result(metrics: Metrics, engine: Pool, started: float) -> dict:
    """``failed``: the engine died while it was needed."""
    ended = metrics.finishes
    return {
        "requests": metrics.totals["requests"],
        "tokens": metrics.totals["completion_tokens"],
        "prompt_tokens": metrics.totals["prompt_tokens"],
        "cached_tokens": metrics.totals["cached_tokens"],
        "completed": ended.get("stop", 0) + ended.get("length", 0),
        "aborted": ended.get("abort", 0),
        "errors": ended.get("error", 0),
        "malformed": engine.malformed,
        "failed": int(engine.died.done()),
        "seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    entry(run)
