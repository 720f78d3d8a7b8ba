"""A server of this process with engines in others, and a client for it."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import httpx
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from scripts import server
from scripts.build import Settings, build_settings
from scripts.entry import CONF
from scripts.serving.process import Make
from tests.serve import fake_server


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=["api.port=0", *overrides])


@cache
def settings(*overrides: str) -> Settings:
    return build_settings(composed(*overrides))


class Live:
    """A server of this process, its engine in another. ``later`` is a request under way."""

    def __init__(self, folder: Path):
        self.folder = folder

    async def listening(self) -> None:
        file = self.folder / "server.json"
        while not file.is_file():
            await asyncio.sleep(0.02)
        self.http = httpx.AsyncClient(base_url=json.loads(file.read_text())["url"], timeout=30)

    async def post(self, body: dict, **how) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body, **how)

    async def health(self) -> dict:
        return (await self.http.get("/health")).json()

    async def later(self, body: dict) -> asyncio.Task:
        task = asyncio.create_task(self.post(body))
        while not (await self.health())["open"]:
            await asyncio.sleep(0.01)
        return task

    async def closing(self) -> None:
        while (await self.health())["status"] == "ok":
            await asyncio.sleep(0.01)


def live(folder: Path, scenario, config: str = "", api: dict | None = None, **changes) -> dict:
    """The server's result after ``scenario(live)``, which ends with a signal. Its engines have no model."""
    (folder / "config.yaml").write_text(config)
    s = replace(settings(), api=replace(settings().api, **(api or {})), **changes)
    return serve(s, folder, scenario, fake_server.make_engine)


def serve(s: Settings, folder: Path, scenario, make: Make, seconds: float = 300) -> dict:
    """Likewise, for the settings of ``folder``/config.yaml."""

    async def play() -> None:
        it = Live(folder)
        await it.listening()
        try:
            await scenario(it)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await it.http.aclose()

    async def both() -> dict:
        async with asyncio.timeout(seconds):
            run, played = server.serve(s, folder, make), asyncio.create_task(play())
            result = await run
            await played
            return result

    return asyncio.run(both())
