"""Steps that all ranks of a data-parallel group take together: how large, and whether anybody has work at all.

Every MoE layer is a collective, so all ranks run the same number of layers on the same number of rows: before each step
they exchange one row of integers and take the maximum. A rank without work runs padding. While nobody has work no step
is taken; ranks look in every ``tick_s``, so that one with new work never waits long for the others.
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


WIDTH = 5  # words that ranks exchange: a shape, whether there is work, whether the rank is ready to leave


class Unpaced:
    """One engine by itself: steps are as large as they turn out."""

    tick_s: float | None = None  # wait for mail as long as it takes

    async def agree(self, plan: Plan | None, leaving: bool) -> tuple[Shape | None, bool, bool]:
        """The step's shape, whether a step is taken, whether it is time to leave."""
        return None, plan is not None, leaving

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class Rider(Protocol):
    """What else ranks agree on between two steps: parallel/migrate.py. Its row has ``width`` words."""

    width: int

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
    are summed apart. ``size``: what a rank pads to, given the most of all ranks."""

    def __init__(self, port: Agree, tick_s: float = 0.005, rider: Rider | None = None, size: Callable = bucket):
        self.port, self.tick_s, self.rider, self.size = port, tick_s, rider, size
        self.transport_s = self.skew_s = 0.0

    async def agree(self, plan: Plan | None, leaving: bool) -> tuple[Shape | None, bool, bool]:
        shape = Shape() if plan is None else shape_of(plan)
        more = [] if self.rider is None else self.rider.row()
        rows = self.port.gather([*astuple(shape), int(plan is not None), int(leaving), *more])
        self.transport_s += self.port.transport_s
        self.skew_s += self.port.skew_s
        most = rows.max(0)
        if self.rider is not None:
            self.rider.agreed(rows[:, WIDTH:], bool(most[3]))
        return self.size(Shape(*most[:3].tolist())), bool(most[3]), bool(rows[:, 4].all())

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
