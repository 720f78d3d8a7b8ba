"""Running sequences as arrays over slots, so that a step's host work is a few array operations whatever the batch.

Slot 0 is scratch. P pages of a sequence at most, S stop ids. All values are host numbers; the runner reads them when a
step is launched.
"""

import numpy as np

from serve.request import Sampling


class Table:
    """``slots`` sequences of at most ``context`` tokens; ``generated`` and ``pages`` cost memory only where written."""

    def __init__(self, slots: int, context: int, page_size: int):
        n = slots + 1
        whole = lambda: np.zeros(n, np.int64)  # noqa: E731
        self.handle = whole()  # 0: the slot is free
        self.epoch = whole()  # times the request has been preempted
        self.total = whole()  # tokens known: prompt and generated
        self.computed = whole()  # of those, in the cache
        self.prompt = whole()
        self.limit = whole()  # most tokens it may come to
        self.capacity = whole()  # tokens its pages hold
        self.published = whole()  # full pages that have a name, or will have none
        self.write_from = whole()  # first position whose global rows are its own to write
        self.floor = whole()  # lowest position its windows see while it catches up
        self.kept_from = whole()  # first position that the layers past the trim run on; rings of these start there
        self.last = np.zeros(n, np.int64)  # newest token
        self.seed = whole()
        self.temperature = np.zeros(n, np.float32)
        self.top_p = np.ones(n, np.float32)
        self.top_k = whole()
        self.min_total = whole()  # no stop before this many tokens
        self.stops = np.full((n, 1), -1, np.int64)  # [n, S]
        self.logprobs = np.full(n, -1, np.int64)  # alternatives wanted, -1 none
        self.generated = np.zeros((n, context), np.int32)
        self.pages = np.zeros((n, -(-context // page_size)), np.int32)

    def place(self, slot: int, handle: int, epoch: int, prompt: int, limit: int, sampling: Sampling) -> None:
        """A request moves into ``slot``; what depends on its progress is the scheduler's."""
        self.handle[slot], self.epoch[slot] = handle, epoch
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
        self.handle[slot] = 0

    def held(self, slot: int, page_size: int) -> np.ndarray:
        """The pages [h] of a sequence, a view."""
        return self.pages[slot, : self.capacity[slot] // page_size]

    def halted(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the ``counts`` [R] new tokens [R, K] of each sequence: how many to keep, and whether a stop id ended it.
        The stop id itself is not kept."""
        stops = self.stops[slots]
        if tokens.shape[1] == stops.shape[1] == 1:
            hit = tokens == stops
        else:
            hit = (tokens[:, :, None] == stops[:, None, :]).any(-1)
            hit &= np.arange(tokens.shape[1]) < counts[:, None]
        stopped = hit.any(1)
        return (np.where(stopped, hit.argmax(1), counts) if stopped.any() else counts), stopped

    def append(self, slots: np.ndarray, tokens: np.ndarray, keep: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Store the first ``keep`` [R] of ``tokens`` [R, K] as generated tokens ``at`` [R] and after; returns them all,
        one after another, int32."""
        if tokens.shape[1] == 1:
            if not keep.all():
                slots, tokens, at = slots[keep > 0], tokens[keep > 0], at[keep > 0]
            flat = tokens[:, 0]
            self.generated[slots, at] = flat
            self.last[slots] = flat
            return flat.astype(np.int32)
        row, place = np.nonzero(np.arange(tokens.shape[1]) < keep[:, None])
        flat = tokens[row, place]
        self.generated[slots[row], at[row] + place] = flat
        some = keep > 0
        self.last[slots[some]] = tokens[some, keep[some] - 1]
        return flat.astype(np.int32)
