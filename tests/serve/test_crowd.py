"""Sustained load with aborts, disconnects and nonsense (tests/serve/crowd.py), on an engine without a model."""

import asyncio
import gc

import pytest

from serve.text import Text
from tests.serve.crowd import crowd, resident_mb
from tests.serve.served import serve

SHIPPED = Text.load("model/checkpoints/tiny")


def drive(seconds: float, clients: int) -> None:
    async def go() -> None:
        async with serve(text=SHIPPED, engine={"pause_s": 0.02, "most": 2}) as served:
            await crowd(served.url, seconds / 4, clients)  # pools and caches fill
            await served.front.idle()
            before = memory()
            tally = await crowd(served.url, seconds, clients)
            await asyncio.wait_for(served.front.idle(), 10)
            after, metrics = memory(), served.offer.metrics
        assert tally.wrong == [] and max(tally.status) < 500, tally
        assert {200, 400, 404} <= set(tally.status) and tally.kinds["cut in time"] and tally.kinds["leave"]
        assert sum(metrics.finishes.values()) == metrics.totals["requests"], "every accepted request has an end"
        assert metrics.finishes["abort"] and set(metrics.finishes) <= {"stop", "length", "abort"}
        assert after <= before * 1.05, f"{before:.1f} MB grew to {after:.1f}"

    asyncio.run(go())


def memory() -> float:
    gc.collect()
    return resident_mb()


@pytest.mark.medium
def test_a_short_load():
    drive(4, 16)


@pytest.mark.slow
def test_two_minutes_of_load():
    drive(120, 64)
