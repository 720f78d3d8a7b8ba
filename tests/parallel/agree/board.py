"""Any number of ranks on one board in one process, interleaved by a seeded generator."""

from array import array

import numpy as np

from parallel.agree.recursive import HEAD, Board, Seat, exchange, words_of


class Table:
    """Ranks that each take ``steps`` steps; `turn` lets one of them go on until it waits."""

    def __init__(self, size: int, width: int, seed: int = 0):
        self.board = Board(memoryview(array("q", bytes(8 * words_of(size, width)))), size, width)
        self.seats = [Seat(self.board, r) for r in range(size)]
        self.running: list = [None] * size
        self.step = [0] * size  # that each rank is in
        self.results: list[list[np.ndarray]] = [[] for _ in range(size)]
        self.waits = [0] * size
        self.rng = np.random.default_rng(seed)

    def row(self, rank: int, step: int) -> list[int]:
        noise = np.random.default_rng((rank, step)).integers(-(2**63), 2**63, self.board.width)
        return noise.tolist()

    def begin(self, rank: int) -> None:
        self.step[rank] += 1
        self.seats[rank].put(self.step[rank], self.row(rank, self.step[rank]), rank)
        self.running[rank] = exchange(self.seats[rank], self.step[rank])

    def turn(self, rank: int) -> bool:
        """One resumption of a rank. True if it finished a step by it."""
        if self.running[rank] is None:
            self.begin(rank)
        try:
            next(self.running[rank])
        except StopIteration as end:
            self.results[rank].append(end.value[:, HEAD:])
            self.running[rank] = None
            return True
        return False

    def play(self, steps: int, ranks=None, turns: int = 1_000_000) -> None:
        """Random turns until all of ``ranks`` have done ``steps``, or ``turns`` are over."""
        left = [r for r in (range(self.board.size) if ranks is None else ranks) if len(self.results[r]) < steps]
        while left and turns:
            rank = left[self.rng.integers(len(left))]
            self.turn(rank)
            if len(self.results[rank]) == steps:
                left.remove(rank)
            turns -= 1

    def check(self) -> None:
        """Every result is what the ranks brought in that step, bit for bit."""
        for rank, results in enumerate(self.results):
            for step, rows in enumerate(results, 1):
                expected = np.array([self.row(r, step) for r in range(self.board.size)])
                assert rows.tobytes() == expected.tobytes(), (rank, step)
