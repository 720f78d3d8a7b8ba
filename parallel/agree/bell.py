"""A bell that other processes of the node ring: a pipe without a name, gone with its owner. Nothing travels in it."""

import contextlib
import os
import weakref
from collections.abc import Sequence

WORDS = 3  # of an address: process, descriptor, number of the pipe


class Bell:
    """``fd`` is readable from a ring until `quiet`; ``address`` is for `ring` in another process."""

    def __init__(self):
        self.fd, own = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.address = (os.getpid(), own, os.fstat(own).st_ino)
        for each in (self.fd, own):
            weakref.finalize(self, os.close, each)

    def quiet(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass


class Ringer:
    """Rings the bells of others, each opened at its first ring."""

    def __init__(self):
        self._open: dict[tuple[int, ...], int] = {}

    def ring(self, address: Sequence[int]) -> None:
        """A bell that is gone, or full of rings, is left alone."""
        key = tuple(address)
        with contextlib.suppress(OSError):
            if key not in self._open:
                self._open[key] = os.open(f"/proc/{key[0]}/fd/{key[1]}", os.O_WRONLY | os.O_NONBLOCK)
                weakref.finalize(self, os.close, self._open[key])
            if os.fstat(self._open[key]).st_ino == key[2]:
                os.write(self._open[key], b"!")
