"""Recursive doubling over shared words: the algorithm, without clocks, processes or waiting. n ranks, P the largest
power of two <= n; each brings a row of W words, all get the n rows in log2 P rounds, or two more where n > P.

Rank b < P is a base; rank P + b is folded into it: it writes its row into b's table and reads the full table there.
In round k base b takes from base b ^ 2^k all the rows that one held before the round. `exchange` is a generator that
yields whenever what it needs is not there yet: a port spins on it, a test interleaves as many as it likes.

**Two tables.** A rank that is done with step s may begin s + 1 while others still read its rows of s: steps alternate
between two tables. It cannot be two ahead: to finish s + 1 it needed every rank's row of s + 1, and a rank brings that
only when it has read all it needed of s.

**Words.** ``progress[r] = step * STAGES + stage``, written by r alone, rises for ever: stage 1 is "my row is there",
stage ``first + k`` is "I hold a block of 2^k bases". It is the sequence number of every exchange: a rank that waits
for step s never takes rows of another.

**Memory order.** One writer per word, 8 aligned bytes, which no machine tears. x86 keeps stores in order and loads in
order, so that rows are seen before the progress written after them. Elsewhere (Grace) they may be seen late. Hence each
row carries a seal over its step and words, and whoever has the full table checks every seal; where one fails, it reads
the blocks again until they are right. That needs no fence on any machine, and finds a row that someone else wrote over:
such a row never gets right and the step ends in an error that names it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

LINE = 16  # words between two ranks' own ones: no two in one pair of cache lines
STAGES = 16  # of a step, at most
JOINED, LEFT, ASLEEP, BELL = 1, 2, 3, 4  # words of a rank beside its progress; where its bell is takes three
HEAD = 2  # words in front of a row: its seal, its time of arrival
MAX_RANKS = 1024
MASK = (1 << 64) - 1


def powers(size: int) -> tuple[int, int]:
    """P, and log2 of it."""
    rounds = size.bit_length() - 1
    return 1 << rounds, rounds


def rounds_of(size: int) -> int:
    """Exchanges one after the other: log2 P; where ranks are folded one before and one after."""
    base, rounds = powers(size)
    return rounds + (2 if size > base else 0)


def words_of(size: int, width: int) -> int:
    """Words of a board, and three for who made it."""
    if not 1 <= size <= MAX_RANKS:
        raise ValueError(f"agree: ranks must be 1 to {MAX_RANKS}, got {size}")
    base, _ = powers(size)
    return 3 + size * LINE + 2 * base * (base if size == base else 2 * base) * (width + HEAD)


class Board:
    """What n ranks share: words of each rank, two tables of each base. Rows of ``width`` words."""

    def __init__(self, words: memoryview, size: int, width: int):
        self.words, self.size, self.width = words, size, width
        self.base, self.rounds = powers(size)
        self.folds = size > self.base
        self.slots = 2 if self.folds else 1  # rows beside each other: a base's, and that of the rank folded into it
        self.first = 1 + self.folds  # stage of a base whose own block is complete
        self.complete = self.first + self.rounds
        self.row = width + HEAD
        self.block = self.slots * self.row  # words
        self.own = size * LINE  # where tables begin
        factors = np.random.default_rng(0).integers(-(2**63), 2**63, self.row) | 1
        factors[0] = 1
        self.factors: np.ndarray = factors  # [row] a row's seal makes its product with them its step
        self.weights = factors[1:].tolist()
        ranks = np.arange(size)
        self.order = np.where(ranks < self.base, ranks * 2, (ranks - self.base) * 2 + 1)  # rank -> slot, where folded

    def table(self, rank: int, step: int) -> memoryview:
        """The words of a base's table (of the base it is folded into) in a step."""
        size = self.base * self.block
        begin = self.own + ((step & 1) * self.base + rank % self.base) * size
        return self.words[begin : begin + size]

    def arrived(self, rank: int, step: int) -> bool:
        return self.words[rank * LINE] > step * STAGES


class Seat:
    """One rank's place at the board: the parts of tables it reads and writes, cut once."""

    def __init__(self, board: Board, rank: int):
        if not 0 <= rank < board.size:
            raise ValueError(f"agree: rank must be 0 to {board.size - 1}, got {rank}")
        self.board, self.rank = board, rank
        self.folded = rank >= board.base
        extra = rank + board.base
        self.guest = None if self.folded or extra >= board.size else extra
        mine = rank % board.base
        begin = mine * board.block + (board.row if self.folded else 0)
        tables = [board.table(rank, step) for step in (0, 1)]
        shape = (board.base * board.slots, board.row)
        self.rows = [np.frombuffer(t, np.int64).reshape(shape) for t in tables]
        self.mine = [t[begin : begin + board.row] for t in tables]
        self.takes = [[self.take(k, step) for k in range(board.rounds)] for step in (0, 1)]
        self.blank = np.empty((board.size, board.row), np.int64)

    def take(self, k: int, step: int) -> tuple[int, memoryview, memoryview]:
        """Round k: the other base, its block, and where it goes in our table."""
        board = self.board
        other = self.rank ^ (1 << k)
        low = (other >> k << k) * board.block
        high = low + (board.block << k)
        return other, board.table(other, step)[low:high], board.table(self.rank, step)[low:high]

    def put(self, step: int, row: Sequence[int], arrived: int) -> None:
        """Write our row, sealed. Call before `exchange`."""
        words = [arrived, *map(int, row)]
        if len(words) != self.board.row - 1:
            raise ValueError(f"agree: a row has {self.board.width} words here, got {len(words) - 1}")
        seal = (step - sum(a * b for a, b in zip(words, self.board.weights))) & MASK
        cell = self.mine[step & 1]
        cell[0] = seal - (seal >> 63 << 64)
        for i, word in enumerate(words, 1):
            cell[i] = word


def exchange(seat: Seat, step: int) -> Iterator[int]:
    """Bring our row, get all. Yields the rank it waits for; returns [n, HEAD + width], a copy.

    Steps start at 1 and rise by one. Spinning on it for ever hangs where a rank stays away: see `blame`.
    """
    board, words, parity = seat.board, seat.board.words, step & 1
    here = step * STAGES
    mine = seat.rank * LINE
    words[mine] = here + 1
    if seat.folded:
        host = seat.rank - board.base
        while words[host * LINE] < here + board.complete:
            yield host
    elif seat.guest is not None:
        while words[seat.guest * LINE] <= here:
            yield seat.guest
    if not seat.folded:
        for stage, (other, theirs, ours) in enumerate(seat.takes[parity], here + board.first):
            words[mine] = stage
            while words[other * LINE] < stage:
                yield other
            ours[:] = theirs
        words[mine] = here + board.complete
    while not (held := sound(seat, step)).size:
        yield seat.rank
    return held


def sound(seat: Seat, step: int) -> np.ndarray:
    """A copy of the full table if every seal holds; else nothing, and the blocks are read once more."""
    board, parity = seat.board, step & 1
    held = seat.rows[parity][board.order] if board.folds else seat.rows[parity].copy()
    if (held @ board.factors).tolist() == [step] * board.size:
        return held
    for _, theirs, ours in () if seat.folded else seat.takes[parity]:
        ours[:] = theirs
    return held[:0]


def unsealed(seat: Seat, step: int) -> list[int]:
    """Ranks whose row in our table is not what they wrote in this step."""
    board = seat.board
    held = seat.rows[step & 1][board.order] if board.folds else seat.rows[step & 1]
    return [r for r, value in enumerate((held @ board.factors).tolist()) if value != step]


def blame(board: Board, rank: int, step: int) -> list[int]:
    """Whom ``rank`` waits for in the end: all that did not arrive, however many hops away; else the one that arrived
    and then stopped though all it needs is there. Empty if that is ``rank`` itself."""
    absent = [r for r in range(board.size) if not board.arrived(r, step)]
    if absent:
        return absent
    at = rank
    while (other := awaited(board, at, step)) is not None:
        at = other
    return [] if at == rank else [at]


def awaited(board: Board, rank: int, step: int) -> int | None:
    """The rank whose progress ``rank`` needs and has not; None where it could go on. All have arrived. Each hop of a
    chain leads to an earlier stage, so that chains end."""
    stage = board.words[rank * LINE] - step * STAGES
    if rank >= board.base:
        other, needs = rank - board.base, board.complete
    elif board.first <= stage < board.complete:
        other, needs = rank ^ (1 << (stage - board.first)), stage
    else:  # its guest has arrived, as all have; or it is done
        return None
    return other if board.words[other * LINE] < step * STAGES + needs else None
