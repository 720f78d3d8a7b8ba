"""A request moves from the engine that prefilled it to the one that decodes it: rules, records, letters, events.

Plain values that cross between processes or between transfer and scheduler; serve/disagg/transfer.py says how they are
used.
"""

from dataclasses import dataclass

import numpy as np

from serve.disagg.card import Card

MODES = ("pull", "push")
REBUILDS = ("send", "replay", "halo")
FALLBACKS = ("recompute", "fail")


@dataclass(frozen=True)
class Rules:
    """What `serve.handoff` says. A lease is renewed every ``beat_s``; the prefill side frees what it lent ``lease_s`` +
    ``grace_s`` after the last beat it got, the decode side trusts it for ``lease_s`` from when it *sent* the last beat
    that was answered.

    ``window``: rings of the window are sent (exact), or rebuilt at the decode side by `replay` of the last window
    (approximate) or of the `halo` of all layers (exact). ``fallback``: what becomes of a request whose load failed.
    ``quarantine_s``: how long pages that a peer may still write to are kept from others when it does not answer.
    """

    mode: str = "pull"
    window: str = "send"
    fallback: str = "recompute"
    lease_s: float = 30.0
    grace_s: float = 5.0
    beat_s: float = 5.0
    retry_s: float = 1.0  # until what was not answered is said again
    timeout_s: float = 30.0  # of a load, from its pages to its last byte
    quarantine_s: float = 80.0
    max_kv_loads_per_step: int = 4
    max_descriptors: int = 4096  # of one post

    def __post_init__(self):
        for name, known in (("mode", MODES), ("window", REBUILDS), ("fallback", FALLBACKS)):
            if getattr(self, name) not in known:
                raise ValueError(f"serve.handoff.{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("max_kv_loads_per_step", "max_descriptors"):
            if getattr(self, name) < 1:
                raise ValueError(f"serve.handoff.{name} must be >= 1, got {getattr(self, name)}")
        for name in ("lease_s", "grace_s", "beat_s", "retry_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"serve.handoff.{name} must be > 0, got {getattr(self, name)}")
        if self.beat_s * 2 > self.lease_s:
            raise ValueError(
                f"serve.handoff.lease_s {self.lease_s} must be >= 2 * beat_s {self.beat_s}: a beat may be lost"
            )
        if self.quarantine_s < 2 * (self.lease_s + self.grace_s):
            least = 2 * (self.lease_s + self.grace_s)
            raise ValueError(
                f"serve.handoff.quarantine_s must be >= 2 * (lease_s + grace_s) = {least}, so that a peer that is cut "
                f"off has stopped writing; got {self.quarantine_s}"
            )


@dataclass(frozen=True, eq=False)
class Handoff:
    """A prefilled request, as it travels with its Ask from the prefill engine over the router to a decode engine."""

    engine: str
    born: int  # which life of that engine
    lease: int
    tokens: int  # in the cache: all of the request but the last, which is drawn and not computed
    page_size: int
    pages: np.ndarray  # [ceil(tokens / page_size)] int32, at the prefill engine
    slot: int  # of its rings there


# Letters. A letter to an earlier life of an engine is answered with Stranger.


@dataclass(frozen=True)
class Greet:
    card: Card
    about: bytes  # of the link


@dataclass(frozen=True)
class Welcome:
    card: Card
    about: bytes


@dataclass(frozen=True)
class Refuse:
    """``final``: the layouts differ; else the link did not come about and may do so later."""

    why: str
    final: bool


@dataclass(frozen=True)
class Stranger:
    """You wrote to an earlier life of mine."""


@dataclass(frozen=True)
class Beat:
    """From the decode side: leases to keep, leases to drop, orders to write that it counts as open."""

    seq: int
    keep: tuple[int, ...]
    drop: tuple[int, ...]
    orders: tuple[int, ...]


@dataclass(frozen=True)
class Beaten:
    """The answer: leases of ``keep`` that are gone, and orders of which nothing is under way."""

    seq: int
    gone: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Push:
    """An order: write what ``lease`` holds, from page ``skip`` of the decode side's page size on."""

    order: int
    lease: int
    pages: np.ndarray  # int32, at the decode engine, the skipped ones included
    skip: int
    slot: int


@dataclass(frozen=True)
class Pushed:
    """An order is over: nothing of it will be written any more. ``error`` empty: all of it was written."""

    order: int
    error: str


Body = Greet | Welcome | Refuse | Stranger | Beat | Beaten | Push | Pushed


@dataclass(frozen=True, eq=False)
class Letter:
    sender: str
    born: int
    to_born: int  # life of the receiver that is meant, 0 if unknown
    body: Body


# Events: what a transfer tells its scheduler.


@dataclass(frozen=True)
class Landed:
    """The load of ``handle`` is complete; its pages and slot are the scheduler's."""

    handle: int


@dataclass(frozen=True)
class Lost:
    """The load of ``handle`` failed, its lease is given up. Pages and slot come back as `Returned`, perhaps later."""

    handle: int
    why: str


@dataclass(frozen=True, eq=False)
class Returned:
    """One hold on ``pages`` ends, and ``slot`` is free: of a lease, or of a load that failed or was cancelled."""

    pages: np.ndarray
    slot: int


Event = Landed | Lost | Returned
