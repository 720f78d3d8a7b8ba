"""Step agreement by torch.distributed: an all-gather of int64 on the CPU. Works across nodes; the baseline on one."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import torch
import torch.distributed as dist

from parallel.agree.port import Arrivals, Missing, OutOfStep

BOOT = Path("/proc/sys/kernel/random/boot_id")
HEAD = 2  # words in front of a row: its step, its time of arrival


class Gloo(Arrivals):
    """``group`` is a gloo group whose timeout bounds a gather; ``store`` is one that all its ranks reach, used only to
    name the missing. All ranks make it together. Where they are on several hosts, whose clocks differ, transport and
    skew are not told apart: the whole call counts as transport."""

    bell: int | None = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: dist.Store,
        width: int,
        now: Callable[[], float] = monotonic,
        grace_s: float = 1.0,
    ):
        super().__init__(now)
        self.group, self.store, self.width, self.grace_s = group, store, width, grace_s
        self.rank, self.size, self.step = dist.get_rank(group), dist.get_world_size(group), 0
        self.row = torch.empty(HEAD + width, dtype=torch.int64)
        self.rows = torch.empty(self.size * (HEAD + width), dtype=torch.int64)
        self.failed: Exception | None = None
        self.one_clock = self._one_clock()

    def gather(self, row: Sequence[int]) -> np.ndarray:
        """Raises `Missing` where ranks stay away, `OutOfStep` where they are in another step; for good."""
        if self.failed:
            raise self.failed
        if len(row) != self.width:
            raise ValueError(f"agree: a row has {self.width} words here, got {len(row)}")
        self.step += 1
        begin = self.arrive()
        self.row.numpy()[:] = (self.step, begin, *row)
        try:
            dist.all_gather_into_tensor(self.rows, self.row, group=self.group)
        except RuntimeError as error:  # gloo says that it waited, not for whom
            waited, missing = self.now() - begin / 1e9, self._missing()
            self.failed = error if missing is None else Missing(self.rank, self.step, waited, missing)
            raise self.failed from error
        held = self.rows.numpy().reshape(self.size, -1)
        self.leave(held[:, 1].copy())
        if (held[:, 0] != self.step).any() or held[self.rank, HEAD:].tolist() != list(row):
            self.failed = OutOfStep(f"agree: rank {self.rank} is in step {self.step}, all in {held[:, 0].tolist()}")
            raise self.failed
        return held[:, HEAD:].copy()

    def called(self) -> bool:
        """Nothing tells who waits on another host."""
        return True

    def _one_clock(self) -> bool:
        """Whether all ranks run under one kernel."""
        boot = int(BOOT.read_text().replace("-", "")[:15], 16)
        boots = torch.empty(self.size, dtype=torch.int64)
        dist.all_gather_into_tensor(boots, torch.tensor([boot]), group=self.group)
        return bool((boots == boot).all())

    def _missing(self) -> dict[int, str] | None:
        """Those that do not report, within the grace, that they gave up on this step too; None if all do."""
        key = f"agree/{self.group.group_name}/{self.step}/"
        try:
            self.store.set_timeout(timedelta(seconds=self.grace_s))
            self.store.set(f"{key}{self.rank}", b"")
            until = monotonic() + self.grace_s
            absent = list(range(self.size))
            while absent and monotonic() < until:
                absent = [r for r in absent if not self.store.check([f"{key}{r}"])]
                sleep(0.01)
        except RuntimeError:
            return {}  # the store went with the rank that held it
        return dict.fromkeys(absent, "did not arrive") or None

    def close(self) -> None:
        """The group belongs to who made it."""
