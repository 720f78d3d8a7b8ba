"""The page table on the device: of what a sequence has, only what is new is sent. S slots, P pages, R sequences.

A step's host work must not grow with a prompt, and the table of a long one is long: the scheduler's (on the host) stays
where it is, and a step tells of the pages that were taken since its sequences' last.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve.schedule.table import Table


@dataclass(frozen=True)
class News:
    """Page ``pages[i]`` is number ``places[i]`` of the sequence in slot ``slots[i]``: arrays of one length, a copy."""

    slots: np.ndarray
    places: np.ndarray
    pages: np.ndarray


class PageTable:
    """``rows`` [S, P] on the device; what is behind a sequence's pages are those of the slot's last one. Row 0, of the
    scratch slot, is scratch pages."""

    def __init__(self, slots: int, width: int, device: torch.device | str = "cpu"):
        self.rows = torch.zeros((slots, max(2, width)), dtype=torch.int64, device=device)
        self._stay, self._known = np.zeros((2, slots), np.int64)
        self._of: Table | None = None  # the scheduler's, of which this is the copy

    def news(self, t: Table, slots: np.ndarray) -> News:
        """Pages of the sequences in ``slots`` [R] that have not been told yet; they are now. While a sequence stays
        where it is, its pages are only added to."""
        if self._of is not t:  # another engine on the same runner
            self._of, self._stay[:] = t, 0
        known = self._known[slots]
        moved = self._stay[slots] != t.stay[slots]
        if moved.any():
            known = np.where(moved, 0, known)
            self._stay[slots] = t.stay[slots]
        held = t.capacity[slots] // t.page_size
        self._known[slots] = held
        more = held - known
        owner = np.repeat(np.arange(len(slots)), more)
        places = np.arange(len(owner)) - (np.cumsum(more) - more)[owner] + known[owner]
        return News(slots[owner], places, t.pages[slots[owner], places].astype(np.int64))

    def put(self, news: News) -> None:
        """Write what a step's `news` say, in the order of the steps."""
        if len(news.pages):
            put = lambda a: torch.from_numpy(a).to(self.rows.device)  # noqa: E731
            self.rows[put(news.slots), put(news.places)] = put(news.pages)

    def of(self, slots: np.ndarray, width: int, least: int = 0) -> Tensor:
        """The first ``width`` pages, two or more, of the scratch slot and of ``slots`` [B], gathered on the device:
        [B + 1, width], with the scratch slot's for more sequences up to ``least``."""
        index = np.zeros(max(len(slots), least) + 1, np.int64)
        index[1 : len(slots) + 1] = slots
        return self.rows[:, : max(2, width)][torch.from_numpy(index).to(self.rows.device)]
