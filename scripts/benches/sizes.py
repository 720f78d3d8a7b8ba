"""Sizes of benches that can be chosen: what `benches` in conf/config.yaml means."""

from dataclasses import dataclass

from scripts.mapping import at_least


@dataclass(frozen=True)
class AgreeSizes:
    ranks: tuple[int, ...]
    seconds: float  # of exchanges by each backend, at each number of ranks

    def __post_init__(self):
        some_ranks(self.ranks, "benches.agree.")
        at_least(0, self, ("seconds",), "benches.agree.")


@dataclass(frozen=True)
class DispatchSizes:
    ranks: tuple[int, ...]
    rows: int  # of a step, a rank on average

    def __post_init__(self):
        some_ranks(self.ranks, "benches.dispatch.")
        at_least(1, self, ("rows",), "benches.dispatch.")


@dataclass(frozen=True)
class EplbSizes:
    """``trace``: a routing.npz of eval=routing, None for synthetic streams. Of a trace: over how many ranks, and with
    which numbers of redundant slots; the first gives the figures."""

    trace: str | None
    ranks: int
    redundant: tuple[int, ...]

    def __post_init__(self):
        at_least(1, self, ("ranks",), "benches.eplb.")
        if not self.redundant or any(n < 0 or n % self.ranks for n in self.redundant):
            raise ValueError(
                f"benches.eplb.redundant must each be a multiple of benches.eplb.ranks {self.ranks}, "
                f"got {list(self.redundant)}"
            )


@dataclass(frozen=True)
class HostTableSizes:
    gb: float  # of each of the three tables

    def __post_init__(self):
        if not 0 < self.gb <= 1024:
            raise ValueError(f"benches.hosttable.gb must be above 0 and at most 1024, got {self.gb}")


@dataclass(frozen=True)
class Benches:
    agree: AgreeSizes
    dispatch: DispatchSizes
    eplb: EplbSizes
    hosttable: HostTableSizes


def some_ranks(ranks: tuple[int, ...], where: str) -> None:
    """Raise ValueError unless there are numbers of ranks that a machine can start."""
    if not ranks or not all(2 <= n <= 64 for n in ranks):
        raise ValueError(f"{where}ranks must each be 2 to 64, got {list(ranks)}")
