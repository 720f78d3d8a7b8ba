"""A client that goes away ends the work done for it; answers that are written as they come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from fastapi.responses import Response


class Gone(Exception):
    """The client has closed the connection."""


async def gone(receive: Callable[[], Awaitable[dict]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Callable[[], Awaitable[dict]], work: Coroutine) -> Any:
    """The result of ``work``, which is cancelled when the client goes away; raises Gone then."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Gone
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, flushed as they come; ``close`` is called however it ends."""

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncIterator[bytes], close: Callable[[], None]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._parts, self._close = parts, close

    async def __call__(self, scope, receive, send) -> None:
        try:
            await while_there(receive, self._write(send))
        except Gone:
            pass
        finally:
            self._close()

    async def _write(self, send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
