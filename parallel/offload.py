"""A link on a thread of its own: the same port, of which no call waits for a copy.

`post` returns at once; `poll` and `notes` tell what the thread found since the last call and ask it to look again. The
thread sleeps in between: nothing spins. Errors of a post come out of its first `poll`.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel.port import BUSY, DONE, Link


@dataclass
class Ticket:
    asked: Future  # of the post, then of the latest poll
    inner: Any = None  # the link's ticket, once posted


class Offloaded:
    """Give the inner ``link`` to nobody else: it is called on the thread only."""

    def __init__(self, link: Link):
        self.link, self.name = link, link.name
        self._thread = ThreadPoolExecutor(1, "link")
        self._looking: Future | None = None

    def _wait(self, call, *args: Any) -> Any:
        return self._thread.submit(call, *args).result()

    def register(self, buffer: Any) -> int:
        return self._wait(self.link.register, buffer)

    def about(self) -> bytes:
        return self._wait(self.link.about)

    def meet(self, about: bytes) -> str:
        return self._wait(self.link.meet, about)

    def forget(self, peer: str) -> None:
        self._thread.submit(self.link.forget, peer)

    def prepare(self, spans: np.ndarray, peer: str | None = None) -> Any:
        return self._wait(self.link.prepare, spans, peer)

    def post(self, op: str, peer: str, local: Any, remote: Any, note: bytes = b"") -> Ticket:
        return Ticket(self._thread.submit(self.link.post, op, peer, local, remote, note))

    def poll(self, ticket: Ticket) -> str:
        if not ticket.asked.done():
            return BUSY
        found = ticket.asked.result()
        if ticket.inner is None:
            ticket.inner = found
        elif found == DONE:
            return DONE
        ticket.asked = self._thread.submit(self.link.poll, ticket.inner)
        return BUSY

    def notify(self, peer: str, note: bytes) -> None:
        self._thread.submit(self.link.notify, peer, note)

    def notes(self) -> list[tuple[str, bytes]]:
        found = []
        if self._looking is not None and self._looking.done():
            found, self._looking = self._looking.result(), None
        if self._looking is None:
            self._looking = self._thread.submit(self.link.notes)
        return found

    def close(self) -> None:
        self._wait(self.link.close)
        self._thread.shutdown()
