"""The ports, between processes: equal rows, a missing rank named, nothing left behind."""

import gc
import os
import select
import subprocess
import sys

import numpy as np
import pytest

from parallel import shared
from parallel.agree import node
from parallel.agree.bell import Bell, Ringer
from parallel.agree.port import Alone, Missing
from tests.parallel.agree import ranks


def test_alone():
    port = Alone(2)
    assert port.gather([3, -1]).tolist() == [[3, -1]] and port.gather([1, 1]).dtype == np.int64
    assert port.transport_s == port.skew_s == 0
    with pytest.raises(ValueError, match="2 words"):
        port.gather([1])


def test_one_rank_of_recursive():
    board = node.create(1, 2)
    port = node.Recursive(board.address, 0, 1, 2)
    rows = port.gather([7, -(2**63)])
    kept = rows.copy()
    port.gather([1, 1])
    port.gather([2, 2])
    assert rows.tolist() == kept.tolist() == [[7, -(2**63)]]  # the caller's own, not the board


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_get_equal_rows(size):
    board = node.create(size, 3)
    processes, told = ranks.start(ranks.sums, size, board.address, 40)
    assert told(size) == dict.fromkeys(range(size), True)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


@pytest.mark.parametrize(("fault", "word"), [("killed", "died"), ("left", "left"), ("stopped", "did not arrive")])
def test_missing_rank_is_named_by_all_processes(fault, word):
    """Dead ones at once, long before the timeout; a stopped one at the timeout."""
    board = node.create(4, 1)
    timeout_s = 1.0 if fault == "stopped" else 60.0
    processes, told = ranks.start(ranks.until_missing, 4, board.address, fault, 2, timeout_s)
    heard = told(3)
    assert sorted(heard) == [0, 1, 3]
    for named, message, seconds in heard.values():
        assert named == (2,) and f"rank 2 {word}" in message and "step 3" in message
        assert seconds < 30
    processes[2].kill()


def test_a_rank_that_never_joined_is_named():
    board = node.create(3, 1)
    port = node.Recursive(board.address, 1, 3, 1, timeout_s=0.05)
    with pytest.raises(Missing, match="rank 0 never joined, rank 2 never joined") as error:
        port.gather([1])
    assert error.value.ranks == (0, 2)
    with pytest.raises(Missing):  # for good: its row is half a step old
        port.gather([1])


def test_times_of_the_clock_that_was_passed_in():
    ticks = iter([1.0, 1.5])
    board = node.create(1, 1)
    port = node.Recursive(board.address, 0, 1, 1, now=lambda: next(ticks))
    port.gather([1])
    assert (port.transport_s, port.skew_s) == (0.5, 0.0)


def test_a_rank_joins_once_and_the_shape_must_fit():
    board = node.create(2, 3)
    port = node.Recursive(board.address, 0, 2, 3)
    with pytest.raises(ValueError, match="rank 0 has joined"):
        node.Recursive(board.address, 0, 2, 3)
    with pytest.raises(ValueError, match="no board of 2 ranks with rows of 4 words"):
        node.Recursive(board.address, 1, 2, 4)
    with pytest.raises(ValueError, match="rank must be 0 to 1"):
        node.Recursive(board.address, 2, 2, 3)
    port.close()


def test_nothing_is_left_in_dev_shm_and_the_descriptor_closes():
    before, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    board = node.create(2, 1)
    port = node.Recursive(board.address, 0, 2, 1)
    assert not {f for f in os.listdir("/dev/shm") if "racklab" in f} - before
    del port, board
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_memory_of_another_run_is_never_taken():
    """The same process and descriptor number, another nonce: a board that was made later in the place of a dead one."""
    old = shared.create(4096)
    address, fd = old.address, old.fd
    del old
    new = os.memfd_create("racklab-other")
    assert new == fd or os.dup2(new, fd)
    with pytest.raises(ValueError, match="of a run that ended"):
        shared.attach(address)
    for descriptor in {new, fd}:
        os.close(descriptor)
    with pytest.raises(ValueError, match="cannot be opened"):
        shared.attach("999999999/3/abc")


@pytest.mark.parametrize(("size", "absent"), [(3, None), (3, 1)])
def test_gloo_gets_equal_rows_and_names_the_missing(size, absent, tmp_path):
    processes, told = ranks.start(ranks.by_gloo, size, str(tmp_path / "store"), absent)
    there = [r for r in range(size) if r != absent]
    assert told(len(there)) == dict.fromkeys(there, (True, () if absent is None else (absent,)))
    for process in processes:
        process.kill()


def test_bells_ring_across_processes_and_leave_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    bell = Bell()
    code = "import sys; from parallel.agree.bell import Ringer; Ringer().ring([int(a) for a in sys.argv[1:]])"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, *map(str, bell.address)], check=True, timeout=60)
        assert select.select([bell.fd], [], [], 0)[0]
        bell.quiet()
        assert not select.select([bell.fd], [], [], 0)[0]
    ringer, (process, fd, number) = Ringer(), bell.address
    for wrong in ((process, fd, number + 1), (2**22 + 1, fd, number)):  # another pipe there; nobody there
        ringer.ring(wrong)
    assert not select.select([bell.fd], [], [], 0)[0]
    for _ in range(70_000):  # more than a pipe holds
        ringer.ring(bell.address)
    bell.quiet()
    del bell, ringer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
