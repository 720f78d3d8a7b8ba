"""Load of experts in the last steps, from counters of slots that only grow. L layers, E experts, P slots.

The model counts a layer's choices by slot as it routes them (padding has a column of its own, which is left out here).
What a slot holds changes at times, so counts are turned into those of experts before it does.
"""

import numpy as np

ROWS = 8  # of the ring: its grain is an eighth of the window
MOVES = 2.0  # times the distance of odd from even rows at which a load counts as moving on


class Window:
    """Choices of each expert in the last ``steps`` steps, to the grain."""

    def __init__(self, layers: int, experts: int, steps: int):
        if steps < 1:
            raise ValueError(f"parallel.eplb.window_steps must be >= 1, got {steps}")
        self.grain = -(-steps // ROWS)
        self.ring = np.zeros((ROWS, layers, experts), np.int64)
        self.steps = self._at = 0
        self._last: np.ndarray | None = None  # [L, P] counters when last seen

    def step(self) -> bool:
        """Another step is done; whether `see` is due."""
        self.steps += 1
        return self.steps % self.grain == 0

    def see(self, counters: np.ndarray, plan: np.ndarray) -> None:
        """Add what counters [L, P] gained, by what each slot holds ([L, P]), and begin a new row, the oldest one's."""
        self.credit(counters, plan)
        self._at = (self._at + 1) % len(self.ring)
        self.ring[self._at] = 0

    def credit(self, counters: np.ndarray, plan: np.ndarray) -> None:
        """Add what counters gained to the newest row. To be called with the old plan before another one holds."""
        gained = counters if self._last is None else counters - self._last
        self._last = counters.copy()
        layers, experts = self.ring.shape[1:]
        flat = (plan + np.arange(layers)[:, None] * experts).ravel()
        self.ring[self._at] += (
            np.bincount(flat, gained.ravel(), layers * experts).astype(np.int64).reshape(layers, experts)
        )

    def rows(self) -> np.ndarray:
        """[ROWS, L, E], newest first."""
        return np.roll(self.ring[::-1], self._at + 1, 0)


def recent(rows: np.ndarray) -> np.ndarray:
    """Load [L, E] to plan for, from rows [K, L, E], newest first: that of all rows, or of the newer half (and so on)
    where the load moves on.

    It moves on where the two halves differ much more than odd rows do from even ones: what merely comes and goes is
    better averaged over all rows.
    """
    rows = rows[rows.sum((1, 2)) > 0]
    while len(rows) >= 4:
        half = len(rows) // 2
        if _apart(rows[:half], rows[half:]) < MOVES * _apart(rows[::2], rows[1::2]):
            break
        rows = rows[:half]
    return rows.sum(0)


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """Squared distance of two sets of rows, each as shares of its layers' load."""
    a, b = (x.sum(0) / np.maximum(x.sum((0, 2)), 1)[:, None] for x in (a, b))
    return float(((a - b) ** 2).sum())
