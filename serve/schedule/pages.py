"""KV pages: who holds which, what is cached, what may be reused. Plain Python and numpy; page 0 is scratch.

A page's name is the chained hash of its tokens and of all before them, so a prompt's longest cached prefix is a run of
lookups. Hashes are made by the front end (`chain`); the engine's thread only looks them up. Work on many pages at once
is array work: a prompt of 855,000 tokens has 3,340 pages of 256.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import xxhash

SALT = b"racklab"
_LOOKUPS = 256  # names looked up before checking whether the run has ended
_NEVER = np.iinfo(np.int64).max


def chain(tokens: np.ndarray, page_size: int, before: bytes = SALT) -> list[bytes]:
    """The chained hash of each full page of int32 ``tokens`` [n]; ``before`` is that of the page in front."""
    raw = memoryview(np.ascontiguousarray(tokens, np.int32)).cast("B")
    width, out = page_size * 4, []
    for at in range(0, len(raw) - width + 1, width):
        digest = xxhash.xxh3_128(before)
        digest.update(raw[at : at + width])
        before = digest.digest()
        out.append(before)
    return out


class Run(NamedTuple):
    """Cached pages [h] of a prompt, from its first; as they were at ``time``, a count of namings."""

    pages: np.ndarray
    time: int


NOTHING = Run(np.zeros(0, np.int32), 0)


class Pages:
    """``count`` pages, number 0 scratch. A page is held by one or more (``refs``), or free; a free page that has a name
    can be found again until it is taken for something else, the one freed longest ago first."""

    def __init__(self, count: int, page_size: int):
        if count < 2:
            raise ValueError(f"serve.pages must be >= 1, got {count - 1}")
        self.count, self.page_size = count, page_size
        self.refs = np.zeros(count, np.int32)
        self.free = count - 1
        self._names: list[bytes | None] = [None] * count
        self._since = np.full(count, _NEVER)  # time at which a page got its name
        self._time = 0
        self._index: dict[bytes, int] = {}
        self._blank = np.arange(count - 1, -1, -1, np.int32)  # a stack: free and nameless, taken first
        self._blanks = count - 1
        self._queue = np.zeros(2 * count, np.int32)  # free and named, in the order they were freed
        self._place = np.full(count, -1, np.int64)  # where in the queue a page is; -1: an old entry does not count
        self._head = self._tail = 0

    @property
    def used(self) -> int:
        """Pages that someone holds."""
        return self.count - 1 - self.free

    def take(self, count: int) -> np.ndarray | None:
        """Hold ``count`` pages, losing the names of some that were free; None, and nothing held, if there are not."""
        if count > self.free:
            return None
        self._blanks -= (blank := min(self._blanks, count))
        taken = self._blank[self._blanks : self._blanks + blank].copy()
        if blank < count:
            reclaimed = np.array(self._reclaim(count - blank), np.int32)
            taken = np.concatenate((taken, reclaimed)) if blank else reclaimed
        self.refs[taken] = 1
        self.free -= count
        return taken

    def _reclaim(self, count: int) -> list[int]:
        """The named pages that were freed longest ago, nameless now. One by one: there are few, and most entries of the
        queue count."""
        taken: list[int] = []
        size = len(self._queue)
        while len(taken) < count:
            page = self._queue.item(self._head % size)
            if self._place.item(page) != self._head:
                self._skip()
                continue
            self._head += 1
            del self._index[self._names[page]]
            self._names[page] = None
            taken.append(page)
        self._since[taken], self._place[taken] = _NEVER, -1
        return taken

    def _skip(self) -> None:
        """Pass entries that do not count, perhaps those of a long prompt that was found again."""
        where = np.arange(self._head, min(self._head + _LOOKUPS, self._tail))
        counts = (self._place[self._queue[where % len(self._queue)]] == where).nonzero()[0]
        self._head += int(counts[0]) if len(counts) else len(where)

    def find(self, names: Sequence[bytes], limit: int) -> np.ndarray:
        """Pages [h] of the longest run of ``names[:limit]``, from the first, that is cached. Holds nothing."""
        return self.follow(names, limit, NOTHING).pages

    def follow(self, names: Sequence[bytes], limit: int, known: Run) -> Run:
        """The same, when ``known`` is what an earlier call found for these names: only what changed is looked up."""
        pages = known.pages[:limit]
        changed = (self._since[pages] > known.time).nonzero()[0]
        if len(changed):
            pages = pages[: changed[0]]
        parts, at = [pages], len(pages)
        while at < limit and names[at] in self._index:
            looked = names[at : min(at + _LOOKUPS, limit)]
            got = np.fromiter(map(self._index.get, looked, repeat(0)), np.int32, len(looked))
            ended = (got == 0).nonzero()[0]
            parts.append(got[: ended[0]] if len(ended) else got)
            at += len(parts[-1])
        return Run(np.concatenate(parts) if len(parts) > 1 else pages, self._time)

    def hold(self, pages: np.ndarray) -> None:
        """One more holder for each of ``pages`` [h], all different."""
        refs = self.refs[pages]
        self.free -= len(pages) - np.count_nonzero(refs)
        self.refs[pages] = refs + 1
        self._place[pages] = -1

    def release(self, pages: np.ndarray) -> None:
        """One holder less. The last page is forgotten first: a prefix is of more use than what follows it."""
        refs = self.refs[pages] - 1
        assert not (refs < 0).any(), f"page released that nobody holds: {pages[refs < 0]}"
        self.refs[pages] = refs
        idle = pages[refs == 0][::-1]
        self.free += len(idle)
        named = self._since[idle] < _NEVER
        blank = idle[~named]
        self._blank[self._blanks : self._blanks + len(blank)] = blank
        self._blanks += len(blank)
        self._enqueue(idle[named])

    def publish(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        """Give written pages their names; a name that another page has stays there, and the page nameless."""
        for page, name in zip(pages, names):
            if name not in self._index and self._names[page] is None:
                self._time += 1
                self._index[name], self._names[page], self._since[page] = page, name, self._time

    def _enqueue(self, pages: np.ndarray) -> None:
        size = len(self._queue)
        if self._tail - self._head + len(pages) > size:  # old entries fill it: keep those that count
            queued = self._queued()
            self._head, self._tail = 0, len(queued)
            self._queue[: self._tail] = queued
            self._place[queued] = np.arange(self._tail)
        where = np.arange(self._tail, self._tail + len(pages))
        self._queue[where % size] = pages
        self._place[pages] = where
        self._tail += len(pages)

    def _queued(self) -> np.ndarray:
        """Pages in the queue, the one freed longest ago first."""
        where = np.arange(self._head, self._tail)
        pages = self._queue[where % len(self._queue)]
        return pages[self._place[pages] == where]

    def check(self, holders: Iterable[np.ndarray]) -> None:
        """Assert that ``holders``, one array of pages each, are all who hold pages, and every page is in one place."""
        refs = np.zeros_like(self.refs)
        for pages in holders:
            assert len(set(pages.tolist())) == len(pages), f"a holder has a page twice: {pages}"
            refs[pages] += 1
        wrong = np.flatnonzero(refs != self.refs)
        assert not len(wrong), f"pages {wrong}: {self.refs[wrong]} holders counted, there are {refs[wrong]}"
        assert refs[0] == 0, "the scratch page is held"
        assert self.free == int((refs[1:] == 0).sum()), f"{self.free} pages counted as free"
        blank = self._blank[: self._blanks].tolist()
        assert sorted([*blank, *self._queued().tolist()]) == (1 + np.flatnonzero(refs[1:] == 0)).tolist(), (
            "free pages in no or two places"
        )
        named = {name: page for page, name in enumerate(self._names) if name is not None}
        assert named == self._index and not set(blank) & set(named.values())
        assert sorted(named.values()) == np.flatnonzero(self._since < _NEVER).tolist()
