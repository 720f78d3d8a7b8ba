"""KV pages: who holds which, what is cached, what may be reused. Plain Python and numpy; page 0 is scratch.

A page's name is the chained hash of its tokens and of all before them, so a prompt's longest cached prefix is a run of
lookups. Hashes are made by the front end (`chain`); the engine's thread only looks them up. Work on many pages at once
is array work: a prompt of 855,000 tokens has 3,340 pages of 256.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

SALT = b"racklab"
_LOOKUPS = 256  # names looked up before checking whether the run has ended


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
        self._named = np.zeros(count, bool)
        self._index: dict[bytes, int] = {}
        self._blank = list(range(count - 1, 0, -1))  # free and nameless, taken first
        self._queue = np.zeros(2 * count, np.int32)  # free and named, in the order they were freed
        self._place = np.full(count, -1, np.int64)  # where in the queue a page is; -1: an old entry does not count
        self._head = self._tail = 0

    @property
    def used(self) -> int:
        """Pages that someone holds."""
        return self.count - 1 - self.free

    def take(self, count: int) -> list[int] | None:
        """Hold ``count`` pages, losing the names of some that were free; None, and nothing held, if there are not."""
        if count > self.free:
            return None
        reused = min(len(self._blank), count)
        taken = [self._blank.pop() for _ in range(reused)]
        while len(taken) < count:
            page = int(self._queue[self._head % len(self._queue)])
            if self._place[page] == self._head:
                self._forget(page)
                taken.append(page)
            self._head += 1
        self.refs[taken] = 1
        self.free -= count
        return taken

    def find(self, names: Sequence[bytes], limit: int) -> np.ndarray:
        """Pages [h] of the longest run of ``names[:limit]``, from the first, that is cached. Holds nothing."""
        found: list[int] = []
        for at in range(0, limit, _LOOKUPS):
            got = list(map(self._index.get, names[at : min(at + _LOOKUPS, limit)]))
            if None in got:
                found += got[: got.index(None)]
                break
            found += got
        return np.array(found, np.int32)

    def hold(self, pages: np.ndarray) -> None:
        """One more holder for each of ``pages`` [h], all different."""
        self.free -= int((self.refs[pages] == 0).sum())
        self.refs[pages] += 1
        self._place[pages] = -1

    def release(self, pages: np.ndarray) -> None:
        """One holder less. The last page is forgotten first: a prefix is of more use than what follows it."""
        assert (self.refs[pages] > 0).all(), f"page released that nobody holds: {pages[self.refs[pages] <= 0]}"
        self.refs[pages] -= 1
        idle = pages[self.refs[pages] == 0][::-1]
        self.free += len(idle)
        named = self._named[idle]
        self._blank.extend(idle[~named].tolist())
        self._enqueue(idle[named])

    def publish(self, page: int, name: bytes) -> None:
        """Give a written page its name, unless another page has that name already."""
        if name not in self._index and not self._named[page]:
            self._index[name] = page
            self._names[page], self._named[page] = name, True

    def _forget(self, page: int) -> None:
        del self._index[self._names[page]]
        self._names[page], self._named[page], self._place[page] = None, False, -1

    def _enqueue(self, pages: np.ndarray) -> None:
        size = len(self._queue)
        if self._tail - self._head + len(pages) > size:  # old entries fill it: keep those that count
            where = np.arange(self._head, self._tail)
            queued = self._queue[where % size]
            live = queued[self._place[queued] == where]
            self._queue[: len(live)] = live
            self._place[live] = np.arange(len(live))
            self._head, self._tail = 0, len(live)
        where = np.arange(self._tail, self._tail + len(pages))
        self._queue[where % size] = pages
        self._place[pages] = where
        self._tail += len(pages)

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
        where = np.arange(self._head, self._tail)
        queued = self._queue[where % len(self._queue)]
        waiting = queued[self._place[queued] == where].tolist()
        assert sorted([*self._blank, *waiting]) == np.flatnonzero(refs[1:] == 0).__add__(1).tolist()
        assert all(self._names[p] is None for p in self._blank)
        assert {name: p for p, name in enumerate(self._names) if name is not None} == self._index
