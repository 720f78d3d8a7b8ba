"""`python -m tests.serve.fake_server key=value`: scripts.server with an engine process that has no model."""

import os
from pathlib import Path

from parallel.mesh import Seat
from serve.text import Text
from serve.wire.codec import Hello
from serve.wire.pair import EngineWire
from tests.serve.fake import FakeEngine, script

SHIPPED = Text.load("model/checkpoints/tiny")
ANSWER = "Hello, world. "
COUNTING = " ".join(map(str, range(400)))
UNLUCKY, BREAKS, EXITS, COUNTS = (f"max_tokens: {i}\n" for i in range(13, 17))  # lines of the config


def make_engine(config: Path, wire: EngineWire, seat: Seat) -> tuple[FakeEngine, Hello]:
    """An engine that cannot be built, raises at its first request, ends there, or counts, if the config says so."""
    said = config.read_text()
    if UNLUCKY in said:
        raise ValueError("max_tokens=13 is bad luck")
    answer = script(ANSWER, SHIPPED.encode)
    if COUNTS in said:
        answer = script(COUNTING, SHIPPED.encode)
    if BREAKS in said:
        answer = lambda ask: 1 // 0  # noqa: E731
    if EXITS in said:
        answer = lambda ask: os._exit(9)  # noqa: E731
    return FakeEngine(wire, answer, pause_s=0.01, name=seat.name), Hello(SHIPPED.vocab_size, 512, 64)


if __name__ == "__main__":
    from scripts.entry import entry
    from scripts.server import run

    entry(lambda s: run(s, make_engine))
