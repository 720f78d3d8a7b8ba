"""A request moves from the engine that prefilled it to the one that decodes it: rules, records, letters, events.

Plain values that cross between processes or between transfer and scheduler; serve/disagg/transfer.py says how they are
used.
"""

import hashlib
from dataclasses import dataclass, fields

import numpy as np
import torch

from model.cache import Layout

VERSION = 1  # of letters and layout
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
                raise ValueError(f"handoff.{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("max_kv_loads_per_step", "max_descriptors"):
            if getattr(self, name) < 1:
                raise ValueError(f"handoff.{name} must be >= 1, got {getattr(self, name)}")
        for name in ("lease_s", "grace_s", "beat_s", "retry_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"handoff.{name} must be > 0, got {getattr(self, name)}")
        if self.beat_s * 2 > self.lease_s:
            raise ValueError(f"handoff.lease_s {self.lease_s} must be >= 2 * beat_s {self.beat_s}: a beat may be lost")
        if self.quarantine_s < 2 * (self.lease_s + self.grace_s):
            least = 2 * (self.lease_s + self.grace_s)
            raise ValueError(
                f"handoff.quarantine_s must be >= 2 * (lease_s + grace_s) = {least}, so that a peer that is cut "
                f"off has stopped writing; got {self.quarantine_s}"
            )


@dataclass(frozen=True)
class Card:
    """What two engines must agree on to read each other's cache. Sizes in bytes."""

    version: int
    model: str  # digest of the config, and which weights
    storage: str
    dtype: str
    page_size: int  # tokens
    planes: tuple[int, ...]  # of a page, one after another
    rings: int  # layers with a window, the drafter's included
    ring_size: int  # rows of one
    slot: tuple[int, int, int]  # bytes of a sequence's rings, tails, last tokens

    @property
    def page_bytes(self) -> int:
        return sum(self.planes)


def card(layout: Layout, dtype: torch.dtype, weights: str) -> Card:
    """The card of an engine. ``weights``: name of the checkpoint, the same on both sides."""
    cfg = layout.cfg
    unit = 1 if layout.packed else layout.atom * dtype.itemsize
    tails = layout.slot_tails * 2 * cfg.head_dim * torch.float32.itemsize
    tokens = layout.token_depth * torch.int64.itemsize
    return Card(
        VERSION,
        f"{hashlib.sha256(repr(cfg).encode()).hexdigest()[:16]} {weights}",
        layout.storage,
        str(dtype).removeprefix("torch."),
        layout.page_size,
        tuple(n * unit for s in cfg.kv_source_layer_ids for n in layout.plane_units(s)),
        cfg.num_rings,
        cfg.ring_size,
        (layout.slot_rings * layout.ring_row_bytes(dtype), tails, tokens),
    )


def mismatch(mine: Card, theirs: Card) -> str:
    """Why two engines cannot hand requests over, naming each field that differs; empty if they can.

    Page sizes may differ if one is a multiple of the other: planes are cut (parallel/spans.py).
    """
    large, small = max(mine.page_size, theirs.page_size), min(mine.page_size, theirs.page_size)
    ratio = large // small if small else 0
    wrong = []
    for f in fields(Card):
        a, b = getattr(mine, f.name), getattr(theirs, f.name)
        if f.name == "page_size":
            same = bool(ratio) and ratio * small == large
        elif f.name == "planes":
            a, b = (tuple(n * large // max(c.page_size, 1) for n in c.planes) for c in (mine, theirs))
            same = a == b
        else:
            same = a == b
        if not same:
            wrong.append(f"{f.name} {a} here, {b} there")
    return "; ".join(wrong)


@dataclass(frozen=True, eq=False)
class Handoff:
    """A prefilled request, as it travels with its Ask from the prefill engine over the router to a decode engine."""

    engine: str
    born: int  # which life of that engine
    lease: int
    tokens: int  # of the prompt, all in the cache
    page_size: int
    pages: np.ndarray  # [ceil(tokens / page_size)] int32, at the prefill engine
    slot: int  # of its rings there
    first: int  # token drawn by the prefill


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
