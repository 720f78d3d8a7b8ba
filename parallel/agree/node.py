"""Step agreement of one node's ranks: recursive doubling over shared memory (`parallel.agree.recursive`), with waiting.

One process makes the board and tells its address to all; each rank joins with it, once. A rank holds a lock on its
byte of the segment as long as it lives, so that others can tell a dead one from a late one. Nothing is left behind by
any end."""

import fcntl
import os
import struct
from array import array
from collections.abc import Callable, Generator, Sequence
from time import monotonic, sleep

import numpy as np

from parallel import shared
from parallel.agree import bell
from parallel.agree.bell import Bell, Ringer
from parallel.agree.port import Arrivals, Missing, OutOfStep
from parallel.agree.recursive import (
    ASLEEP,
    BELL,
    HEAD,
    JOINED,
    LEFT,
    LINE,
    Board,
    Seat,
    blame,
    exchange,
    unsealed,
    words_of,
)

MAGIC = 0x72616772656531  # of a board, with its size and width the last words of its segment
SPINS = 200  # yields of the processor before a look at the clock
SPIN_S = 0.002  # of waiting before sleeps begin
LOOK_S = 0.05  # of waiting between two looks at who is dead
LOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process


def create(size: int, width: int) -> shared.Segment:
    """The board of ``size`` ranks and rows of ``width`` words; keep it until all have joined its ``address``."""
    segment = shared.create(8 * words_of(size, width))
    shared.words(segment)[-3:] = memoryview(array("q", (MAGIC, size, width)))
    return segment


class Recursive(Arrivals):
    """``timeout_s`` bounds a gather, whatever the others do; 0 < ``timeout_s``. ``now`` gives seconds of a clock that
    all ranks of the node share."""

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        width: int,
        timeout_s: float = 300.0,
        now: Callable[[], float] = monotonic,
    ):
        super().__init__(now)
        self.segment = shared.attach(address)
        words = shared.words(self.segment)
        if len(words) < 3 or tuple(words[-3:]) != (MAGIC, size, width) or len(words) != words_of(size, width):
            raise ValueError(f"agree: {address} is no board of {size} ranks with rows of {width} words")
        self.board = Board(words, size, width)
        self.seat = Seat(self.board, rank)
        self.rank, self.size, self.width, self.timeout_s, self.step = rank, size, width, timeout_s, 0
        self.failed: Exception | None = None
        if not self._lock(rank) or words[rank * LINE + JOINED]:
            raise ValueError(f"agree: rank {rank} has joined {address} already; one that comes back needs a new board")
        self._bell, self._ringer, self._word = Bell(), Ringer(), rank * LINE + ASLEEP
        self.bell: int | None = self._bell.fd
        words[rank * LINE + BELL : rank * LINE + BELL + bell.WORDS] = memoryview(array("q", self._bell.address))
        words[rank * LINE + JOINED] = 1

    def gather(self, row: Sequence[int]) -> np.ndarray:
        """Raises `Missing` or `OutOfStep`, and from then on always."""
        if self.failed:
            raise self.failed
        self.board.words[self._word] = 0
        self.seat.put(self.step + 1, row, self.arrive())
        self.step += 1
        held = self._wait(exchange(self.seat, self.step))
        self.leave(held[:, 1])
        return held[:, HEAD:]

    def called(self) -> bool:
        """Where not, the next to arrive rings our bell. It writes its arrival, then reads who sleeps; we write that we
        sleep, then read who arrived. Processors may swap the two on both sides: look again now and then."""
        self.board.words[self._word] = 1
        self._bell.quiet()
        return any(self.board.arrived(r, self.step + 1) for r in range(self.size))

    def _wake(self) -> None:
        words = self.board.words
        for at in range(0, self.size * LINE, LINE):
            if words[at + ASLEEP]:
                self._ringer.ring(words[at + BELL : at + BELL + bell.WORDS])

    def _wait(self, steps: Generator[int, None, np.ndarray]) -> np.ndarray:
        """Run to the end: yield the processor at first, then sleep ever longer."""
        spins, pause = 0, os.sched_yield
        try:
            next(steps)
            self._wake()
            while True:
                next(steps)
                pause()
                spins += 1
                if spins == SPINS:
                    self._be_patient(steps)
        except StopIteration as end:
            return end.value

    def _be_patient(self, steps: Generator[int, None, np.ndarray]) -> None:
        """Wait with an eye on the clock and on the others. Ends by the StopIteration of ``steps``, or by an error."""
        begin = self.mine / 1e9
        looked = begin
        while True:
            next(steps)
            at = self.now()
            if at - looked > LOOK_S or at - begin > self.timeout_s:
                self._look(at - begin)
                looked = at
            if at - begin < SPIN_S:
                os.sched_yield()
            else:
                sleep(min((at - begin) / 50, 0.001))

    def _look(self, waited_s: float) -> None:
        """Raise if a rank that we wait for is dead or left, or if time is up."""
        guilty = blame(self.board, self.rank, self.step)
        why = {r: self._state(r) for r in guilty}
        gone = {r: text for r, text in why.items() if text in ("left", "died")}
        if gone or waited_s > self.timeout_s:
            self.failed = Missing(self.rank, self.step, waited_s, gone or why)
            broken = unsealed(self.seat, self.step)
            if not guilty and broken:  # all is here, and wrong
                self.failed = OutOfStep(f"agree: rows of ranks {broken} in step {self.step} are not what they wrote")
            raise self.failed

    def _state(self, rank: int) -> str:
        words = self.board.words
        if not words[rank * LINE + JOINED]:
            return "never joined"
        if words[rank * LINE + LEFT]:
            return "left"
        if self._free(rank):
            return "died"
        return "stopped halfway" if self.board.arrived(rank, self.step) else "did not arrive"

    def _lock(self, rank: int) -> bool:
        """Take the lock on a rank's byte; it goes with the open file, thus with the process."""
        try:
            fcntl.fcntl(self.segment.fd, fcntl.F_OFD_SETLK, struct.pack(LOCK, fcntl.F_WRLCK, 0, rank, 1, 0))
        except BlockingIOError:
            return False
        return True

    def _free(self, rank: int) -> bool:
        asked = struct.pack(LOCK, fcntl.F_WRLCK, 0, rank, 1, 0)
        return struct.unpack(LOCK, fcntl.fcntl(self.segment.fd, fcntl.F_OFD_GETLK, asked))[0] == fcntl.F_UNLCK

    def close(self) -> None:
        """Leave: others that wait for us learn it at once."""
        self.board.words[self.rank * LINE + LEFT] = 1
        self.failed = self.failed or OutOfStep(f"agree: rank {self.rank} has left")
