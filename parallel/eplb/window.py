"""Load of experts in the last steps, from counters of slots that only grow. L layers, E experts, P slots.

The model counts a layer's choices by slot as it routes them (padding has a column of its own, which is left out here).
What a slot holds changes at times, so counts are turned into those of experts before it does.
"""

import numpy as np

ROWS = 16  # of the ring: its grain is a sixteenth of the window


class Window:
    """Choices of each expert in the last ``steps`` steps, to the grain."""

    def __init__(self, layers: int, experts: int, steps: int):
        if steps < 1:
            raise ValueError(f"parallel.eplb.window_steps must be >= 1, got {steps}")
        self.rows = min(ROWS, steps)
        self.grain = -(-steps // self.rows)
        self.ring = np.zeros((self.rows, layers, experts), np.int64)
        self.steps = 0
        self._last: np.ndarray | None = None  # [L, P] counters when last seen

    def step(self) -> bool:
        """Another step is done; whether `see` is due."""
        self.steps += 1
        return self.steps % self.grain == 0

    def see(self, counters: np.ndarray, plan: np.ndarray) -> None:
        """Add what counters [L, P] gained, by what each slot holds ([L, P]), and begin a new row, the oldest one's."""
        self.credit(counters, plan)
        self.ring = np.roll(self.ring, 1, 0)
        self.ring[0] = 0

    def credit(self, counters: np.ndarray, plan: np.ndarray) -> None:
        """Add what counters gained to the newest row. To be called with the old plan before another one holds."""
        gained = counters if self._last is None else counters - self._last
        self._last = counters.copy()
        layers, experts = self.ring.shape[1:]
        flat = (plan + np.arange(layers)[:, None] * experts).ravel()
        self.ring[0] += np.bincount(flat, gained.ravel(), layers * experts).astype(np.int64).reshape(layers, experts)

    def total(self) -> np.ndarray:
        """int64 [L, E]."""
        return self.ring.sum(0)

    def clear(self) -> None:
        self.ring[:] = 0
