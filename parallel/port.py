"""The port of one-sided copies between processes: parallel/link.py is NIXL, parallel/local.py its twin in one process.

A link registers buffers (regions, numbered in order), meets peers by exchanging `about` bytes, and copies spans between
its own regions and a peer's. A span is (region, offset, length) in bytes; n spans are an int64 array [n, 3]. The two
sides of a copy have as many spans, of equal lengths (parallel/spans.py makes them so).
"""

from typing import Any, Protocol

import numpy as np

BUSY, DONE = "busy", "done"
OPS = ("read", "write")


class LinkError(RuntimeError):
    """A copy or a message failed; the peer may be well."""


class PeerLost(LinkError):
    """The peer is gone, or was never met: nothing can be copied from or to it until it is met (again)."""

    def __init__(self, peer: str, why: str):
        super().__init__(f"peer {peer}: {why}")
        self.peer = peer


class SpanError(ValueError):
    """Spans that lie outside the regions or do not fit each other: our own slip, or a peer that is not what it says."""


class Link(Protocol):
    """One thread calls it. Whatever touches a peer may raise PeerLost, and does so at once for one known to be lost."""

    name: str

    def register(self, buffer: Any) -> int:
        """Number of the region that a contiguous torch tensor or numpy array becomes; the link keeps it alive."""
        ...

    def about(self) -> bytes:
        """What a peer must know to reach the regions registered so far."""
        ...

    def meet(self, about: bytes) -> str:
        """Name of the peer that sent ``about``; one met before under that name is forgotten first."""
        ...

    def forget(self, peer: str) -> None:
        """Remove a peer; unknown ones are no error."""
        ...

    def prepare(self, spans: np.ndarray, peer: str | None = None) -> Any:
        """A list of spans of ``peer`` (None: our own), to be used by number many times. Raises SpanError."""
        ...

    def post(self, op: str, peer: str, local: Any, remote: Any, note: bytes = b"") -> Any:
        """Start to read from ``peer`` into our spans, or write our spans to it; returns a ticket.

        ``local`` and ``remote``: spans, or (prepared list, int32 numbers) as a pair. ``note`` reaches the peer's
        `notes` when the copy is complete. Raises SpanError, LinkError.
        """
        ...

    def poll(self, ticket: Any) -> str:
        """BUSY or DONE; raises LinkError once the copy has failed. The ticket is used up by DONE and by an error."""
        ...

    def notify(self, peer: str, note: bytes) -> None: ...

    def notes(self) -> list[tuple[str, bytes]]:
        """(peer, note) that came since the last call."""
        ...

    def close(self) -> None: ...


def check(spans: np.ndarray, sizes: list[int], whose: str) -> np.ndarray:
    """``spans`` as int64 [n, 3]; raises SpanError for one outside the regions of ``sizes`` bytes."""
    spans = np.asarray(spans, np.int64)
    if spans.ndim != 2 or spans.shape[1] != 3 or not len(spans):
        raise SpanError(f"spans of {whose} must be [n >= 1, 3] (region, offset, length), got shape {spans.shape}")
    region, offset, length = spans.T
    known = (region >= 0) & (region < len(sizes))
    ends = np.array(sizes or [0], np.int64)[np.where(known, region, 0)]
    bad = ~known | (offset < 0) | (length < 1) | (offset + length > ends)
    if bad.any():
        i = int(bad.argmax())
        raise SpanError(f"span {i} of {whose} is {tuple(spans[i].tolist())}; its regions have {sizes} bytes")
    return spans


def fit(local: np.ndarray, remote: np.ndarray) -> None:
    """Raise SpanError unless the two sides have equal lengths, span by span."""
    if len(local) != len(remote):
        raise SpanError(f"{len(local)} spans here, {len(remote)} at the peer")
    unequal = local[:, 2] != remote[:, 2]
    if unequal.any():
        i = int(unequal.argmax())
        raise SpanError(f"span {i} has {local[i, 2]} bytes here and {remote[i, 2]} at the peer")
