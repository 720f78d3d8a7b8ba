"""Steps that all ranks of a data-parallel group take together: how large, and whether anybody has work at all.

Every MoE layer is a collective, so all ranks run the same number of layers on the same number of rows: before each step
they exchange one row of integers and take the maximum. A rank without work runs padding. While nobody has work no step
is taken and nothing is exchanged. Who gets work arrives at the next exchange and rings the others, who join it: the
arrival is the call, and bears the number of its exchange, so that none is stale, early or lost. Across nodes nothing
rings, and ranks meet every few milliseconds to find out.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np

from parallel.agree.port import Agree
from serve.schedule.plan import Plan


@dataclass(frozen=True)
class Shape:
    """Sizes of one step: rows, rows of the layers past a trim, sequences that draft. What each rank pads to."""

    rows: int = 0
    late: int = 0
    drafting: int = 0


WIDTH = 6  # words that ranks exchange: a shape, whether there is work, whether the rank is ready to leave, or paused


class Unpaced:
    """One engine by itself: steps are as large as they turn out."""

    tick_s: float | None = None  # wait for mail as long as it takes

    async def agree(self, plan: Plan | None, leaving: bool, paused: bool = False) -> tuple[Shape | None, bool, bool]:
        """The step's shape, whether a step is taken (not while a rank is ``paused``), whether it is time to leave."""
        return None, plan is not None and not paused, leaving

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Rider(Protocol):
    """What else ranks agree on between two steps: parallel/migrate.py. Its row has ``width`` words."""

    width: int
    busy: bool  # wants exchanges though nobody has work

    def row(self) -> list[int]: ...

    def agreed(self, rows: np.ndarray, worked: bool) -> None:
        """All ranks' rows, after one step has ended and before the next is launched (``worked``), if one is."""
        ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def bucket(most: Shape) -> Shape:
    """Every rank as large as the largest (dispatch=allgather)."""
    return most


def ragged(most: Shape) -> Shape:
    """Every rank as large as it is (dispatch=alltoall): all draft if one does, each its own number."""
    return Shape(drafting=min(most.drafting, 1))


class Lockstep:
    """Engines that share experts. ``port`` is parallel/agree's, for rows of WIDTH words and the rider's; its two times
    are summed apart. ``size``: what a rank pads to, given the most of all ranks. While idle a rank looks every
    ``tick_s``, or, where the mail is told to `watch` the port's bell, every ``bell_s``."""

    def __init__(
        self, port: Agree, tick_s: float = 0.005, rider: Rider | None = None, size: Callable = bucket,
        bell_s: float = 0.25,
    ):  # fmt: skip
        self.port, self.rider, self.size = port, rider, size
        self._tick_s, self._bell_s, self._asleep = tick_s, bell_s, False
        self.transport_s = self.skew_s = 0.0

    @property
    def tick_s(self) -> float:
        """Longest wait for mail or the bell: short until it is known that nobody has work."""
        return self._bell_s if self._asleep else self._tick_s

    async def agree(self, plan: Plan | None, leaving: bool, paused: bool = False) -> tuple[Shape | None, bool, bool]:
        riding = self.rider is not None and self.rider.busy
        self._asleep = (plan is None or paused) and not leaving and not riding and not self.port.called()
        if self._asleep:
            return None, False, False
        shape = Shape() if plan is None else shape_of(plan)
        more = [] if self.rider is None else self.rider.row()
        rows = self.port.gather([*astuple(shape), int(plan is not None), int(leaving), int(paused), *more])
        self.transport_s += self.port.transport_s
        self.skew_s += self.port.skew_s
        most = rows.max(0)
        working = bool(most[3]) and not most[5]
        if self.rider is not None:
            self.rider.agreed(rows[:, WIDTH:], working)
        return self.size(Shape(*most[:3].tolist())), working, bool(rows[:, 4].all())

    def stats(self) -> dict[str, float]:
        more = {} if self.rider is None else self.rider.stats()
        return {"agree_transport_seconds": self.transport_s, "agree_skew_seconds": self.skew_s, **more}

    def close(self) -> None:
        if self.rider is not None:
            self.rider.close()


def shape_of(plan: Plan) -> Shape:
    """What the plan needs at most; drafts that are not verified leave padding."""
    late = len(plan.decode) * (1 + plan.drafts)
    kept = plan.table.kept_from
    for p in plan.prefills:
        late += max(0, p.start + p.count - max(p.start, int(kept[p.sequence.slot])))
    return Shape(plan.tokens, late, len(plan.decode) if plan.drafts else 0)
