"""What tests do to engine processes of a live server, and how they see that it is well again."""

import asyncio
import multiprocessing
import os
import signal

from tests.scripts.live import Live


async def struck(it: Live, name: str, number: signal.Signals, bodies: list[dict]) -> list[str]:
    """The texts of requests that are under way while an engine process gets a signal."""
    pid = pid_of(name)
    asked = [asyncio.create_task(it.post(body)) for body in bodies]
    await until(lambda: busy(it, len(bodies)))
    os.kill(pid, number)
    answers = [answer.json() for answer in await asyncio.gather(*asked)]
    return [a["choices"][0]["text"] if "choices" in a else str(a) for a in answers]


def pid_of(name: str) -> int:
    return next(p.pid for p in multiprocessing.active_children() if p.name == name)


async def until(what, seconds: float = 100) -> None:
    async with asyncio.timeout(seconds):
        while not await what():
            await asyncio.sleep(0.02)


async def busy(it: Live, n: int) -> bool:
    """Whether n requests are open, and each has its first token."""
    health = await it.health()
    return health["open"] == n and health["waiting"] == 0


async def groups(it: Live) -> dict[str, str]:
    return (await it.health())["models"]["tiny"]["groups"]


async def back(it: Live, body: dict) -> None:
    """Return when all groups are up again, have answered ``body``, and hold nothing."""

    async def up() -> bool:
        return set((await groups(it)).values()) == {"up"} and (await it.health())["status"] == "ok"

    async def idle() -> bool:
        names = ("running", "waiting", "pages_used", "transfer_leases", "transfer_loading")
        lines = (await it.http.get("/metrics")).text.splitlines()
        told = [line.split() for line in lines if line.startswith(tuple(f"racklab_engine_{name}{{" for name in names))]
        return not any(float(value) for _, value in told)

    await until(up)
    assert (await it.post(body)).status_code == 200
    await until(idle)
