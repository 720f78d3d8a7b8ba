"""Letters between engines over ZeroMQ: every engine has one inbox, and a socket to each it writes to.

From one engine to another letters keep their order. They may be lost, with a peer that is gone or slow; the protocol of
serve/disagg says again what matters.
"""

import threading
from typing import Protocol

import zmq

from serve.disagg.handoff import Letter
from serve.wire.codec import LETTERS, decode, encode
from serve.wire.pair import buffers

WAITING = 1000  # letters to one peer


class Inboxes(Protocol):
    """Where engines take their letters. Nothing waits; an engine that is none of ours, or not there yet, is a
    ValueError."""

    def bind(self, engine: str) -> str:
        """What to bind its inbox to."""
        ...

    def bound(self, engine: str, address: str) -> None:
        """It is bound, at ``address``."""
        ...

    def find(self, engine: str) -> str: ...


class LetterNet:
    """``lost`` counts letters to nobody, ``malformed`` what came and is no letter."""

    def __init__(self, name: str, inboxes: Inboxes):
        self._inboxes, self._lock = inboxes, threading.Lock()
        self._context = zmq.Context()
        self.inbox = self._context.socket(zmq.PULL)
        self.inbox.bind(inboxes.bind(name))
        inboxes.bound(name, self.inbox.getsockopt_string(zmq.LAST_ENDPOINT))
        self._peers: dict[str, zmq.Socket] = {}
        self.lost = self.malformed = 0

    def send(self, to: str, letter: Letter) -> None:
        """Never waits. Any thread may call it."""
        with self._lock:
            try:
                self._peer(to).send_multipart(encode(letter), zmq.NOBLOCK)
            except (ValueError, zmq.ZMQError):
                self.lost += 1

    def _peer(self, to: str) -> zmq.Socket:
        if to not in self._peers:
            address = self._inboxes.find(to)
            peer = self._peers[to] = self._context.socket(zmq.PUSH)
            peer.set_hwm(WAITING)
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(address)
        return self._peers[to]

    def take(self) -> list[Letter]:
        """Everything that has come since the last call."""
        taken = []
        while self.inbox.poll(0):
            try:
                taken.append(decode(buffers(self.inbox.recv_multipart(copy=False)), tuple(LETTERS)))
            except ValueError:
                self.malformed += 1
        return taken

    def close(self) -> None:
        with self._lock:
            for socket in (self.inbox, *self._peers.values()):
                socket.close(0)
            self._context.term()
