"""The prompt with the fewest tokens left to compute first: what is cached now may be gone later."""

from collections.abc import Callable

from serve.schedule.sequence import Sequence


def key(sequence: Sequence, cached: Callable[[], int]) -> tuple:
    return (sequence.total - cached(),)
