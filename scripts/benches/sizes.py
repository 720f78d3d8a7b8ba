"""Sizes of benches that can be chosen."""

from dataclasses import dataclass

from scripts.mapping import at_least


@dataclass(frozen=True)
class Agree:
    ranks: tuple[int, ...]
    seconds: float  # of exchanges by each backend, at each number of ranks

    def __post_init__(self):
        if not self.ranks or not all(2 <= n <= 64 for n in self.ranks):
            raise ValueError(f"agree.ranks must each be 2 to 64, got {list(self.ranks)}")
        at_least(0, self, ("seconds",), "agree.")


@dataclass(frozen=True)
class HostTable:
    gb: float  # of each of the three tables

    def __post_init__(self):
        if not 0 < self.gb <= 1024:
            raise ValueError(f"hosttable.gb must be above 0 and at most 1024, got {self.gb}")


@dataclass(frozen=True)
class Dispatch:
    ranks: tuple[int, ...]
    rows: int  # of a step, a rank on average

    def __post_init__(self):
        if not self.ranks or not all(2 <= n <= 64 for n in self.ranks):
            raise ValueError(f"dispatch.ranks must each be 2 to 64, got {list(self.ranks)}")
        at_least(1, self, ("rows",), "dispatch.")


@dataclass(frozen=True)
class Eplb:
    """Of a trace: over how many ranks, and with which numbers of redundant slots; the first gives the figures."""

    ranks: int
    redundant: tuple[int, ...]

    def __post_init__(self):
        at_least(1, self, ("ranks",), "eplb.")
        if not self.redundant or any(n < 0 or n % self.ranks for n in self.redundant):
            raise ValueError(
                f"eplb.redundant must each be a multiple of eplb.ranks {self.ranks}, got {list(self.redundant)}"
            )
