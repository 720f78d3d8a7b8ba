"""The listening socket and the loop that serves it, until it is told to stop."""

import asyncio
import contextlib
import ipaddress
import socket

import uvicorn
from fastapi import FastAPI


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ValueError where it cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)  # whoever reads where it listens may connect before the server's loop takes it over
    except OSError as error:
        raise ValueError(f"api.host={host} api.port={port}: {error.strerror or error}") from None
    return made


def loopback(host: str) -> bool:
    """Only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """uvicorn, leaving signals to the script."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def listen(app: FastAPI, sock: socket.socket, stop: asyncio.Event, grace_s: float = 5.0) -> None:
    """Serve until ``stop`` is set and connections have been told, or ``grace_s`` has passed."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=max(1, round(grace_s))
    )
    server = Server(config)

    async def watch() -> None:
        await stop.wait()
        server.should_exit = True

    watcher = asyncio.create_task(watch())
    try:
        await server.serve([sock])
    finally:
        watcher.cancel()
