"""Sustained load with aborts, disconnects and nonsense (tests/serve/crowd.py): an engine without a model, and the real
server, whose memory is watched from before its first request."""

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
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


@pytest.mark.slow
def test_two_minutes_of_load_on_the_real_engine(tmp_path):
    """`scripts.server` with the shipped model: both processes stay within 5% of what they had before any request."""
    command = [sys.executable, "-m", "scripts.server", "api.port=0", "track=none", f"hydra.run.dir={tmp_path}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        told = tmp_path / "server.json"
        while not told.is_file():
            assert server.poll() is None
            time.sleep(0.1)
        url, pids = json.loads(told.read_text())["url"], [server.pid, engine_of(server.pid)]
        before = [resident_mb(pid) for pid in pids]
        tally = asyncio.run(crowd(url, 120, 64))
        engine = idle(url)
        after = [resident_mb(pid) for pid in pids]
    finally:
        server.send_signal(signal.SIGTERM)
        result = json.loads(server.communicate(timeout=60)[0].splitlines()[-1])
    assert tally.wrong == [] and max(tally.status) < 500, tally
    assert {200, 400, 404} <= set(tally.status) and tally.kinds["cut in time"] and tally.kinds["leave"]
    assert engine["pages_used"] == 0 and result["failed"] == 0
    assert result["completed"] + result["aborted"] == result["requests"], "every accepted request has an end"
    assert all(b <= a * 1.05 for a, b in zip(before, after, strict=True)), f"MB: {before} grew to {after}"


def engine_of(pid: int) -> int:
    """The process of a server that holds the model."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return max(map(int, children), key=resident_mb)


def idle(url: str, seconds: float = 20) -> dict[str, float]:
    """Gauges of the engine when nothing runs any more."""
    until = time.monotonic() + seconds
    while True:
        found = re.findall(r"^racklab_engine_(\w+)(?:\{.*\})? (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
        gauges = {name: float(value) for name, value in found}
        if not gauges["running"] and not gauges["waiting"] and not gauges["pages_used"]:
            return gauges
        assert time.monotonic() < until, gauges
        time.sleep(0.1)
