"""Processes of a bench: answers in the order of ranks, exceptions and deaths by the rank's name."""

import os
import signal
import time

import pytest

from scripts.benches.processes import each_rank


def late(rank: int, tell, step_s: float) -> None:
    """The first rank tells last; it dies as soon as it has."""
    time.sleep(step_s * (3 - rank))
    tell((rank, os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


def broken(rank: int, tell, how: str) -> None:
    if rank == 1 and how == "raises":
        raise RuntimeError("no seat")
    if rank == 1:
        os._exit(3)
    tell(rank)
    time.sleep(60)


@pytest.mark.parametrize("how", ("fork", "spawn"))
def test_answers_come_in_the_order_of_ranks(how):
    told = each_rank(3, late, (0.05,), how)
    assert [rank for rank, _ in told] == [0, 1, 2] and len({pid for _, pid in told} | {os.getpid()}) == 4


@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "rank 1: RuntimeError: no seat; no figures"), ("dies", "rank 1 died .* exit code 3")],
)
def test_a_rank_that_fails_is_named_at_once(how, message):
    begin = time.monotonic()
    with pytest.raises(ValueError, match=message):
        each_rank(2, broken, (how,), "fork")
    assert time.monotonic() - begin < 30, "the rank that sleeps is not waited for"
