"""Shortest prompt first: mean wait falls, long prompts pay. ``cap`` tokens and more count as equal."""

from collections.abc import Callable

from serve.schedule.sequence import Sequence


def key(sequence: Sequence, cached: Callable[[], int], cap: int) -> tuple:
    return (min(sequence.total, cap),)
