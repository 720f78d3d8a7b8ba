"""First come, first served."""

from collections.abc import Callable

from serve.schedule.sequence import Sequence


def key(sequence: Sequence, cached: Callable[[], int]) -> tuple:
    return ()
