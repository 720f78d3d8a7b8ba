"""Steps that all ranks of a data-parallel group take together: how large, and whether anybody has work at all.

Every MoE layer is a collective, so all ranks run the same number of layers on the same number of rows: before each step
they exchange one row of integers and take the maximum. A rank without work runs padding. While nobody has work no step
is taken; ranks look in every ``tick``, so that one with new work never waits long for the others.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np

from serve.plan import Plan


@dataclass(frozen=True)
class Shape:
    """Sizes of one step: rows, rows of the layers past a trim, sequences that draft. What each rank pads to."""

    rows: int = 0
    late: int = 0
    drafting: int = 0


class Alone:
    """One rank agrees with itself: steps are as large as they turn out."""

    size = 1
    tick: float | None = None  # wait for mail as long as it takes

    def agree(self, plan: Plan | None, leaving: bool) -> tuple[Shape | None, bool, bool]:
        """The step's shape, whether a step is taken, whether all ranks leave."""
        return None, plan is not None, leaving


class Lockstep:
    """``gather(row)`` returns all ranks' rows [n, width] int64, the same on all ranks: parallel/agree."""

    def __init__(self, gather: Callable[[np.ndarray], np.ndarray], size: int, tick: float = 0.005):
        self.gather, self.size, self.tick = gather, size, tick

    def agree(self, plan: Plan | None, leaving: bool) -> tuple[Shape | None, bool, bool]:
        shape = Shape() if plan is None else shape_of(plan)
        row = np.array([*astuple(shape), plan is not None, leaving], np.int64)
        rows = self.gather(row)
        most = rows.max(0)
        return Shape(*most[:3].tolist()), bool(most[3]), bool(rows[:, 4].all())


def shape_of(plan: Plan) -> Shape:
    """What the plan needs at most; drafts that are not verified leave padding."""
    late = len(plan.decode) * (1 + plan.drafts)
    kept = plan.table.kept_from
    for p in plan.prefills:
        late += max(0, p.start + p.count - max(p.start, int(kept[p.sequence.slot])))
    return Shape(plan.tokens, late, len(plan.decode) if plan.drafts else 0)
