"""What a prefix hit does about windows, which are no part of a page (spec section 13.4), and which rows prefill skips.

Global rows of a hit are read as they are; a sequence's window rings must hold its last positions before it goes on.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

WINDOWS = ("none", "replay", "halo", "retain")
PREFILLS = ("full", "decoder_replay", "layer20_replay")


@dataclass(frozen=True)
class Resume:
    """Where a sequence starts: ``start`` is computed first, global rows are written from ``cached`` on, windows see
    nothing below ``floor``."""

    start: int = 0
    cached: int = 0
    floor: int = 0


@dataclass(frozen=True)
class WindowRule:
    """``window`` tokens, ``layers`` of the backbone.

    none    no hits
    replay  recompute the last window before the hit's end: bounded work, approximate (their windows are cut short)
    halo    recompute everything that the windows at the hit's end depend on: layers * window tokens, exact
    retain  hits end where a stored copy of the rings ends: no work, exact, bounded memory
    """

    mode: str
    window: int
    layers: int

    def __post_init__(self):
        if self.mode not in WINDOWS:
            raise ValueError(f"serve.window must be one of {', '.join(WINDOWS)}, got {self.mode!r}")

    @property
    def replayed(self) -> int:
        """Tokens recomputed after a hit: even, so that a group of two tokens is whole."""
        span = {"replay": self.window, "halo": self.layers * self.window}.get(self.mode, 0)
        return span + span % 2

    def rebuild(self, cached: int) -> Resume:
        """How windows at the end of ``cached`` tokens are computed again, whatever that costs."""
        start = max(0, cached - cached % 2 - self.replayed)
        return Resume(start, cached, start)

    def resume(self, cached: int) -> Resume:
        """What to do with a hit of ``cached`` tokens. One that saves nothing is not adopted."""
        if self.mode == "none" or cached <= self.replayed:
            return Resume()
        start = cached - self.replayed
        return Resume(start, cached, start if self.replayed else 0)


class Tails:
    """Stored rings for ``window=retain``: which store slot holds the rings at the end of which page. LRU, bounded."""

    def __init__(self, slots: Sequence[int]):
        self._free = list(slots)
        self._stored: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # by page name: slot, pages up to there

    def longest(self, names: Sequence[bytes], pages: int) -> int:
        """The most of ``pages`` after which rings are stored."""
        if pages > len(self._stored):  # a long prompt
            reach = (n for name, (_, n) in self._stored.items() if n <= pages and names[n - 1] == name)
            return max(reach, default=0)
        while pages and names[pages - 1] not in self._stored:
            pages -= 1
        return pages

    def slot(self, name: bytes) -> int:
        """Where the rings at the end of page ``name`` are."""
        self._stored.move_to_end(name)
        return self._stored[name][0]

    def forget(self, slot: int) -> None:
        """What was to be copied to ``slot`` does not come."""
        for name, (held, _) in self._stored.items():
            if held == slot:
                del self._stored[name]
                self._free.append(slot)
                return

    def store(self, name: bytes, pages: int) -> int | None:
        """A slot to copy rings to, those at the end of page ``name``, the last of ``pages``; None where they are stored
        already, or there is no room at all."""
        if name in self._stored:
            self._stored.move_to_end(name)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._stored:
            slot = self._stored.popitem(last=False)[1][0]
        else:
            return None
        self._stored[name] = slot, pages
        return slot
