"""The bytes of one handed-over request: which spans on the two sides, and their copy in posts of bounded size."""

from dataclasses import dataclass

import numpy as np

from parallel import spans
from parallel.port import BUSY, DONE, Link, LinkError
from serve.disagg.card import Card

PAGES, RINGS, TAILS, TOKENS = range(4)  # regions, in the order in which every engine registers its pools


@dataclass
class Counts:
    """Since the start: what was asked for and what merging made of it."""

    copies: int = 0
    tokens: int = 0
    bytes: int = 0
    pieces: int = 0  # spans before merging
    descriptors: int = 0  # and after
    posts: int = 0

    def add(self, pair: spans.Pair, pieces: int, tokens: int) -> None:
        """A copy of ``pair``, which was ``pieces`` spans before merging."""
        self.copies += 1
        self.tokens += tokens
        self.bytes += int(pair[0][:, 2].sum())
        self.pieces += pieces
        self.descriptors += len(pair[0])


@dataclass(frozen=True, eq=False)
class Place:
    """A request's part of one engine's pools."""

    card: Card
    pages: np.ndarray
    slot: int


def between(here: Place, there: Place, tokens: int, begin: int, with_slot: bool) -> tuple[spans.Pair, int]:
    """Merged spans of tokens [begin, tokens) and, ``with_slot``, of rings, tails and last tokens; and the count before
    merging. ``begin`` is a multiple of both page sizes.

    Pages of one size are whole spans. Otherwise both sides are cut into the planes of the smaller page.
    """
    size = min(here.card.page_size, there.card.page_size)
    first, last = begin // size, -(-tokens // size)
    sides = [_pages(p, size, first, last, here.card.page_size == there.card.page_size) for p in (here, there)]
    if with_slot:
        sides = [np.concatenate((side, _slot(p))) for side, p in zip(sides, (here, there))]
    if not len(sides[0]):
        return (sides[0], sides[1]), 0
    return spans.merge(*sides), len(sides[0])


def _pages(p: Place, size: int, first: int, last: int, whole: bool) -> np.ndarray:
    if whole:
        return spans.records(PAGES, p.pages[first:last], p.card.page_bytes)
    parts = p.card.page_size // size
    cut = spans.cells(PAGES, p.pages, np.array(p.card.planes), parts)
    return cut.reshape(len(p.pages) * parts, -1, 3)[first:last].reshape(-1, 3)


def _slot(p: Place) -> np.ndarray:
    size = np.array(p.card.slot, np.int64)
    return np.stack((np.array([RINGS, TAILS, TOKENS]), p.slot * size, size), 1)


class Copy:
    """Spans on their way, one bounded post after another. After DONE or an error nothing of it moves any more; DONE of
    one that was ``cancelled`` does not mean that all has moved."""

    def __init__(self, link: Link, op: str, peer: str, pair: spans.Pair, most: int, counts: Counts):
        self.link, self.op, self.peer, self.counts = link, op, peer, counts
        self.cancelled = False
        self._left = list(spans.posts(*pair, most))[::-1]
        self._ticket = None

    def poll(self) -> str:
        """BUSY or DONE; raises LinkError."""
        if self._ticket is not None:
            try:
                if self.link.poll(self._ticket) == BUSY:
                    return BUSY
            except LinkError:
                self._left.clear()
                self._ticket = None
                raise
            self._ticket = None
        if not self._left:
            return DONE
        local, remote = self._left.pop()
        self.counts.posts += 1
        self._ticket = self.link.post(self.op, self.peer, local, remote)
        return BUSY

    def cancel(self) -> None:
        """Post no more of it; what is under way ends by itself."""
        self.cancelled = True
        self._left.clear()
