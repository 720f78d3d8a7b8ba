"""The pair of sockets between the HTTP process and an engine's (serve/mailbox.py is the same within one process)."""

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from serve.request import Outputs, ToEngine
from serve.wire.codec import TO_ENGINE, TO_FRONT, Failed, Hello, Ping, Pong, decode, encode


def buffers(frames: list[zmq.Frame]) -> list[memoryview]:
    return [f.buffer for f in frames]


def _socket(context: zmq.Context, address: str, bind: bool) -> zmq.Socket:
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # the front end's limits bound what is under way; a send never blocks a step
    socket.setsockopt(zmq.LINGER, 1000)  # ms
    (socket.bind if bind else socket.connect)(address)
    return socket


class EngineWire:
    """The engine's side: `take`, `wait` and `put` of a mailbox. `wait` blocks its process, which has nothing else to
    do. ``malformed`` counts dropped messages."""

    def __init__(self, address: str):
        self._context = zmq.Context()
        self._socket = _socket(self._context, address, bind=False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self.malformed = 0

    def watch(self, inbox: zmq.Socket | int) -> None:
        """Let `wait` return for what comes to ``inbox`` (serve/wire/net.py, or a descriptor), too."""
        self._poller.register(inbox, zmq.POLLIN)

    def take(self) -> list[ToEngine]:
        """Everything that has come since the last call, in order; a Ping is answered here."""
        taken: list[ToEngine] = []
        while self._socket.poll(0):
            try:
                message = decode(buffers(self._socket.recv_multipart(copy=False)), TO_ENGINE)
            except ValueError:
                self.malformed += 1
                continue
            if isinstance(message, Ping):
                self.put(Pong())
            else:
                taken.append(message)
        return taken

    async def wait(self, timeout: float | None = None) -> None:
        """Return once there is something to take, or after ``timeout`` seconds."""
        self._poller.poll(None if timeout is None else timeout * 1e3)

    def put(self, message: Outputs | Hello | Failed | Pong) -> None:
        self._socket.send_multipart(encode(message), copy=False)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class FrontWire:
    """The HTTP process's side; call it on a running event loop, `receive` the Hello first. ``malformed`` counts dropped
    messages, ``undelivered`` those for an engine that is gone."""

    def __init__(self, address: str):
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, address, bind=True)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)  # with the port, where any was asked for
        self.malformed = 0
        self.undelivered = 0

    def send(self, message: ToEngine | Ping) -> None:
        """Raises ValueError for a message over the size limit."""
        sent = self._socket.send_multipart(encode(message), flags=zmq.NOBLOCK, copy=False)
        if sent.done() and sent.exception() is not None:
            self.undelivered += 1

    async def receive(self) -> Outputs | Hello | Failed | Pong:
        """The next message that is one."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                return decode(buffers(frames), TO_FRONT)
            except ValueError:
                self.malformed += 1

    async def pump(self, deliver: Callable[[Outputs | Failed | Pong], None]) -> None:
        """Hand every message but a Hello to ``deliver``, until cancelled."""
        while True:
            message = await self.receive()
            if not isinstance(message, Hello):
                deliver(message)
                await asyncio.sleep(0)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
