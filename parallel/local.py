"""The twin of NIXL in one process: the same port, states and errors, with faults to inject. For tests and simulation.

A copy happens in `poll`, once its time has come by the clock: ``cost(bytes, spans)`` seconds after the post.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from parallel.port import BUSY, DONE, OPS, LinkError, PeerLost, check, fit


@dataclass(frozen=True)
class Fault:
    """What is wrong with one copy: ``delay_s`` more, and then ``fails`` (half of its spans are copied all the same)."""

    delay_s: float = 0.0
    fails: bool = False


@dataclass
class Fabric:
    """What joins the links of a process. ``fault(op, link, peer)`` is asked once a post."""

    now: Callable[[], float]
    cost: Callable[[int, int], float] = lambda size, spans: 0.0
    fault: Callable[[str, str, str], Fault] = lambda op, link, peer: Fault()
    links: dict[str, "LocalLink"] = field(default_factory=dict)  # alive, by name
    copied: Callable[["Copied"], None] = lambda copied: None  # told of each copy that is complete
    lives: int = 0  # links made so far

    def kill(self, name: str) -> None:
        """The process of that link dies: its own copies stop, those of others with it fail."""
        self.links.pop(name).alive = False


@dataclass
class Copied:
    """One ticket: spans of ``link`` and of ``peer``."""

    op: str
    link: "LocalLink"
    peer: "LocalLink"
    local: np.ndarray
    remote: np.ndarray
    note: bytes
    due_s: float
    fails: bool


@dataclass(frozen=True)
class Prepared:
    spans: np.ndarray


class LocalLink:
    def __init__(self, fabric: Fabric, name: str):
        if name in fabric.links:
            raise LinkError(f"a link named {name} is alive already")
        self.fabric, self.name, self.alive = fabric, name, True
        self.regions: list[np.ndarray] = []  # bytes
        self._peers: dict[str, LocalLink] = {}
        self._notes: list[tuple[str, bytes]] = []
        fabric.lives += 1
        self.life = fabric.lives  # tells it from one of the same name before or after it
        fabric.links[name] = self

    def register(self, buffer: torch.Tensor | np.ndarray) -> int:
        if isinstance(buffer, torch.Tensor):
            buffer = buffer.detach().view(-1).view(torch.uint8).numpy()
        self.regions.append(buffer.reshape(-1).view(np.uint8))
        return len(self.regions) - 1

    @property
    def sizes(self) -> list[int]:
        return [len(r) for r in self.regions]

    def about(self) -> bytes:
        return json.dumps({"name": self.name, "life": self.life}).encode()

    def meet(self, about: bytes) -> str:
        try:
            told = json.loads(about)
            name, life = told["name"], told["life"]
        except (ValueError, TypeError, KeyError) as error:
            raise LinkError(f"not what a link says about itself: {error}") from None
        found = self.fabric.links.get(name)
        if found is None or found.life != life:
            raise PeerLost(name, "there is no such process")
        self._peers[name] = found
        return name

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def prepare(self, spans: np.ndarray, peer: str | None = None) -> Prepared:
        owner = self if peer is None else self._peer(peer)
        return Prepared(check(spans, owner.sizes, owner.name))

    def post(self, op: str, peer: str, local: Any, remote: Any, note: bytes = b"") -> Copied:
        assert op in OPS, op
        other = self._peer(peer)
        mine, theirs = self._spans(local, self), self._spans(remote, other)
        fit(mine, theirs)
        fault = self.fabric.fault(op, self.name, peer)
        took = self.fabric.cost(int(mine[:, 2].sum()), len(mine)) + fault.delay_s
        return Copied(op, self, other, mine, theirs, note, self.fabric.now() + took, fault.fails)

    def poll(self, ticket: Copied) -> str:
        if not ticket.peer.alive:
            raise PeerLost(ticket.peer.name, "its process ended during a copy")
        if self.fabric.now() < ticket.due_s:
            return BUSY
        self._copy(ticket, len(ticket.local) // 2 if ticket.fails else len(ticket.local))
        if ticket.fails:
            raise LinkError(f"a {ticket.op} with {ticket.peer.name} failed")
        self.fabric.copied(ticket)
        if ticket.note:
            ticket.peer._notes.append((self.name, ticket.note))
        return DONE

    def notify(self, peer: str, note: bytes) -> None:
        self._peer(peer)._notes.append((self.name, note))

    def notes(self) -> list[tuple[str, bytes]]:
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        if self.alive:
            self.fabric.kill(self.name)

    def _peer(self, name: str) -> "LocalLink":
        peer = self._peers.get(name)
        if peer is None:
            raise PeerLost(name, "it was never met")
        if not peer.alive:
            raise PeerLost(name, "its process ended")
        return peer

    def _spans(self, given: Any, owner: "LocalLink") -> np.ndarray:
        if isinstance(given, tuple):
            return given[0].spans[given[1]]
        return check(given, owner.sizes, owner.name)

    def _copy(self, ticket: Copied, count: int) -> None:
        for (mine, at, size), (theirs, there, _) in zip(ticket.local[:count].tolist(), ticket.remote[:count].tolist()):
            here = self.regions[mine][at : at + size]
            peer = ticket.peer.regions[theirs][there : there + size]
            if ticket.op == "read":
                here[:] = peer
            else:
                peer[:] = here
