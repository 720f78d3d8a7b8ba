"""Running sequences as arrays over slots, so that a step's host work is a few array operations whatever the batch.

Slot 0 is scratch. R sequences of a step, K tokens drawn of each at most, P pages of a sequence at most, S stop ids. All
values are host numbers; the runner reads them when a step is launched.
"""

import mmap
from typing import NamedTuple

import numpy as np

from serve.request import Sampling

NEVER = 1 << 62  # tokens


def lazy(rows: int, width: int) -> np.ndarray:
    """Zeros [rows, width] int32 that cost memory only where they are written. numpy's own would ask for huge pages: for
    2 MB, cleared on the step's time, where a row is first touched."""
    return np.frombuffer(mmap.mmap(-1, rows * width * 4), np.int32).reshape(rows, width)


class Added(NamedTuple):
    """What became of a step's tokens: ``keep`` [R] of each sequence's, all of them one after another, who ended."""

    keep: np.ndarray
    flat: np.ndarray  # [sum keep] int32
    ended: np.ndarray  # places in R
    stopped: np.ndarray | None  # [R] bool, by a stop id; None: nobody


class Table:
    """``slots`` sequences of at most ``context`` tokens that verify at most ``drafts`` a step."""

    def __init__(self, slots: int, context: int, page_size: int, drafts: int = 0):
        n = slots + 1
        whole = lambda: np.zeros(n, np.int64)  # noqa: E731
        self.moves = 0  # times that a sequence came or went
        self.handle = whole()  # 0: the slot is free
        self.epoch = whole()  # times the request has been preempted
        self.stay = whole()  # number of its stay in the slot, never used twice
        self.total = whole()  # tokens known: prompt and generated
        self.computed = whole()  # of those, in the cache
        self.prompt = whole()
        self.limit = whole()  # most tokens it may come to
        self.capacity = whole()  # tokens its pages hold
        self.published = whole()  # full pages that have a name
        self.name_at = np.full(n, NEVER)  # tokens in the cache at which pages are named next
        self.write_from = whole()  # first position whose global rows are its own to write
        self.floor = whole()  # lowest position its windows see while it catches up
        self.kept_from = whole()  # first position that the layers past the trim run on; rings of these start there
        self.last = whole()  # newest token
        self.seed = whole()
        self.temperature = np.zeros(n, np.float32)
        self.top_p = np.ones(n, np.float32)
        self.top_k = whole()
        self.min_total = whole()  # no stop before this many tokens
        self.stops = np.full((n, 1), -1, np.int64)  # [n, S]
        self.logprobs = np.full(n, -1, np.int64)  # alternatives wanted, -1 none
        self.page_size = page_size
        self.pages = lazy(n, -(-context // page_size))
        self.generated = lazy(n, context + drafts)  # what lies past ``total`` means nothing
        self._flat = self.generated.reshape(-1)
        self._firsts = np.arange(1 + drafts)[:, None]
        self._kept = np.tri(2 + drafts, 1 + drafts, -1, bool)  # row i: its first i

    def place(self, slot: int, handle: int, epoch: int, prompt: int, limit: int, sampling: Sampling) -> None:
        """A request moves into ``slot``; what depends on its progress is the scheduler's."""
        self.moves += 1
        self.handle[slot], self.epoch[slot], self.stay[slot] = handle, epoch, self.moves
        self.prompt[slot], self.limit[slot] = prompt, limit
        self.seed[slot], self.temperature[slot] = sampling.seed, sampling.temperature
        self.top_p[slot], self.top_k[slot] = sampling.top_p, sampling.top_k
        self.min_total[slot] = prompt + sampling.min_tokens
        self.logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        wide = len(sampling.stop_ids)
        if wide > self.stops.shape[1]:
            more = np.full((len(self.stops), wide - self.stops.shape[1]), -1, np.int64)
            self.stops = np.concatenate((self.stops, more), 1)
        self.stops[slot] = -1
        self.stops[slot, :wide] = sampling.stop_ids

    def clear(self, slot: int) -> None:
        self.moves += 1
        self.handle[slot] = 0

    def held(self, slot: int) -> np.ndarray:
        """The pages [h] of a sequence, a view."""
        return self.pages[slot, : self.capacity[slot] // self.page_size]

    def give(self, slots: np.ndarray, have: np.ndarray, need: np.ndarray, taken: np.ndarray) -> None:
        """The first ``need[0]`` of pages ``taken`` go to ``slots[0]`` behind the ``have[0]`` that it has, and so on."""
        if len(taken) == len(slots) and need.all():  # one each
            self.pages[slots, have] = taken
        else:
            first = np.cumsum(need) - need
            self.pages[slots.repeat(need), np.arange(len(taken)) + (have - first).repeat(need)] = taken
        self.capacity[slots] = (have + need) * self.page_size

    def append(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> Added:
        """Take in the first ``counts`` [R] of ``tokens`` [R, K] of each sequence, as far as its limit and its stop ids
        let it: an id that stops is not kept. ``total``, ``computed``, ``last`` and ``generated`` are brought up to
        date."""
        by_place = tokens.T.astype(np.int32, order="C")  # [K, R]: few long rows
        before, limit = self.total[slots], self.limit[slots]
        keep = np.minimum(counts, limit - before)
        stopped = self._stopped(slots, by_place, keep)
        if stopped is not None:
            stopped, keep = stopped
        after = before + keep
        ended = after >= limit if stopped is None else (after >= limit) | stopped
        begin = slots * self.generated.shape[1] + before - self.prompt[slots]
        self._flat[begin + self._firsts[: len(by_place)]] = by_place  # failed drafts, too: overwritten, or past the end
        self.last[slots] = by_place[0] if len(by_place) == 1 else self._flat[begin + keep - 1]
        self.total[slots], self.computed[slots] = after, np.minimum(before + counts - 1, after)
        if len(by_place) == 1 and stopped is None:
            flat = by_place[0]
        else:
            flat = tokens[self._kept.take(keep, 0)[:, : len(by_place)]].astype(np.int32)
        return Added(keep, flat, ended.nonzero()[0], stopped)

    def _stopped(self, slots: np.ndarray, by_place: np.ndarray, counts: np.ndarray) -> tuple | None:
        """[R] who meets a stop id among the first ``counts`` tokens, and how many come before it; None: nobody."""
        hit = self.stops[:, 0][slots] == by_place
        if self.stops.shape[1] > 1:
            hit |= (self.stops[slots, 1:].T[:, None] == by_place).any(0)
        if not np.count_nonzero(hit):
            return None
        hit &= self._firsts[: len(by_place)] < counts
        stopped = hit.any(0)
        return stopped, np.where(stopped, hit.argmax(0), counts)
