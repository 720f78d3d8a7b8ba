"""The link port: NIXL between two processes and in one, its twin, and both behind a thread."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from parallel.link import LinkSettings, NixlLink, region_of
from parallel.local import Fabric, Fault, LocalLink
from parallel.offload import Offloaded
from parallel.port import BUSY, DONE, LinkError, PeerLost, SpanError
from tests.parallel.link_peer import SIZE, content

KEPT: dict[int, list] = {}  # id of a link -> notes that came while something else was waited for


def keep(link) -> None:
    KEPT.setdefault(id(link), []).extend(link.notes())


def finish(link, ticket, others=(), limit_s=30.0):
    """The end of a copy; ``others`` are polled too, as their processes would do."""
    end = time.monotonic() + limit_s
    while (state := link.poll(ticket)) == BUSY:
        for other in others:
            keep(other)
        assert time.monotonic() < end, "a copy hangs"
    return state


def heard(link, others=(), limit_s=30.0):
    end = time.monotonic() + limit_s
    while not (notes := KEPT.pop(id(link), []) or link.notes()):
        for other in others:
            keep(other)
        assert time.monotonic() < end, "a note was lost"
    return notes


def pair(kind: str):
    if kind == "nixl":
        return [NixlLink(name, LinkSettings(progress=False)) for name in ("left", "right")]
    fabric = Fabric(time.monotonic)
    links = [LocalLink(fabric, name) for name in ("left", "right")]
    return [Offloaded(link) for link in links] if kind == "offloaded" else links


@pytest.fixture(params=["local", "offloaded", "nixl"])
def joined(request):
    """Two links that met, with a tensor and an array each."""
    links, buffers = pair(request.param), []
    for i, link in enumerate(links):
        buffers.append((torch.full((4, 50), float(i)), np.full(100, 10 + i, np.uint8)))
        assert [link.register(b) for b in buffers[-1]] == [0, 1]
    left, right = links
    assert left.meet(right.about()) == "right" and right.meet(left.about()) == "left"
    yield left, right, buffers
    KEPT.clear()
    for link in links:
        link.close()


def test_read_write_note(joined):
    left, right, ((mine, small), (theirs, little)) = joined
    theirs[1] = 7
    spans = np.array([[0, 0, 200], [1, 5, 10]]), np.array([[0, 200, 200], [1, 50, 10]])
    assert finish(left, left.post("read", "right", *spans, note=b"got it"), [right]) == DONE
    assert (mine[0] == 7).all() and (mine[1:] == 0).all()
    assert (small[5:15] == 11).all() and (small[15:] == 10).all()
    assert heard(right, [left]) == [("left", b"got it")]
    assert finish(left, left.post("write", "right", np.array([[1, 0, 3]]), np.array([[1, 97, 3]])), [right]) == DONE
    assert little.tolist() == [11] * 97 + [10] * 3
    right.notify("left", b"hello")
    assert heard(left, [right]) == [("right", b"hello")]


def test_prepared_lists_are_used_by_number(joined):
    left, right, ((_, small), (_, little)) = joined
    little[:] = np.arange(100)
    rows = np.stack((np.ones(10, np.int64), np.arange(10) * 10, np.full(10, 10)), 1)
    local, remote = left.prepare(rows), left.prepare(rows, "right")
    for here, there in (([0, 1], [9, 3]), ([2], [2])):
        numbers = (local, np.array(here, np.int32)), (remote, np.array(there, np.int32))
        assert finish(left, left.post("read", "right", *numbers), [right]) == DONE
    assert small[:30].tolist() == [*range(90, 100), *range(30, 40), *range(20, 30)]


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        ([[0, 0, 8]], [[1, 96, 8]], r"span 0 of right is \(1, 96, 8\); its regions have \[800, 100\] bytes"),
        ([[2, 0, 8]], [[0, 0, 8]], "span 0 of left"),
        ([[0, 0, 8], [0, -1, 4]], [[0, 0, 8], [0, 8, 4]], "span 1 of left"),
        ([[0, 0, 8]], [[0, 0, 9]], "8 bytes here and 9 at the peer"),
        ([[0, 0, 8], [0, 8, 8]], [[0, 0, 16]], "2 spans here, 1 at the peer"),
    ],
)
def test_wrong_spans_are_refused_before_a_byte_moves(joined, local, remote, message):
    left = joined[0]
    with pytest.raises(SpanError, match=message):
        finish(left, left.post("read", "right", np.array(local), np.array(remote)))


def test_unknown_and_forgotten_peers_are_lost_at_once(joined):
    left, *_ = joined
    span = np.array([[1, 0, 1]])
    left.forget("right")
    left.forget("nobody")
    for peer in ("right", "nobody"):
        with pytest.raises(PeerLost, match=f"peer {peer}: it was never met"):
            finish(left, left.post("read", peer, span, span))


def test_nonsense_is_no_peer(joined):
    for about in (b"", b"\xff", b"[]", b'{"nixl": 3}'):
        with pytest.raises(LinkError, match="not what a link says"):
            joined[0].meet(about)


def test_only_contiguous_memory_is_registered():
    for buffer in (torch.zeros(4, 4).t()[1:], np.zeros((4, 4))[:, 1:], np.zeros(0), torch.zeros(0)):
        with pytest.raises(ValueError, match="contiguous"):
            region_of(buffer)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="error_handling must be peer or none"):
        LinkSettings(error_handling="maybe")


# The twin's faults.


def local_pair(**fabric):
    clock = [0.0]
    made = Fabric(lambda: clock[0], **fabric)
    left, right = LocalLink(made, "left"), LocalLink(made, "right")
    buffers = [np.zeros(8, np.uint8), np.arange(8, dtype=np.uint8)]
    for link, buffer in zip((left, right), buffers):
        link.register(buffer)
    left.meet(right.about())
    right.meet(left.about())
    return clock, made, left, right, buffers


SPANS = np.array([[0, 0, 4], [0, 4, 4]])


def test_a_copy_takes_its_time():
    clock, _, left, _, (mine, _) = local_pair(cost=lambda size, n: size + 10 * n)
    ticket = left.post("read", "right", SPANS, SPANS)
    for clock[0] in (0, 27.9):
        assert left.poll(ticket) == BUSY and not mine.any()
    clock[0] = 28
    assert left.poll(ticket) == DONE and mine.tolist() == list(range(8))


def test_a_failed_copy_says_so_and_leaves_half():
    clock, _, left, _, (mine, _) = local_pair(fault=lambda op, link, peer: Fault(5.0, fails=True))
    ticket = left.post("read", "right", SPANS, SPANS)
    assert left.poll(ticket) == BUSY
    clock[0] = 5
    with pytest.raises(LinkError, match="a read with right failed"):
        left.poll(ticket)
    assert mine.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]


def test_death_of_the_peer_and_one_of_the_same_name():
    _, fabric, left, _, (mine, _) = local_pair(cost=lambda size, n: 1)
    ticket = left.post("read", "right", SPANS, SPANS)
    fabric.kill("right")
    for call in (lambda: left.poll(ticket), lambda: left.post("read", "right", SPANS, SPANS)):
        with pytest.raises(PeerLost, match="peer right"):
            call()
    with pytest.raises(LinkError, match="alive already"):
        LocalLink(fabric, "left")
    again = LocalLink(fabric, "right")
    again.register(np.full(8, 9, np.uint8))
    left.meet(again.about())
    fabric.cost = lambda size, n: 0
    assert finish(left, left.post("read", "right", SPANS, SPANS)) == DONE and (mine == 9).all()


def test_no_call_of_an_offloaded_link_waits_for_a_copy():
    class Slow(LocalLink):
        def post(self, *args, **more):
            time.sleep(0.3)
            return super().post(*args, **more)

    fabric = Fabric(time.monotonic)
    left, right = Offloaded(Slow(fabric, "left")), LocalLink(fabric, "right")
    left.register(np.zeros(8, np.uint8))
    right.register(np.ones(8, np.uint8))
    left.meet(right.about())
    begin = time.monotonic()
    ticket = left.post("read", "right", SPANS, SPANS)
    assert left.poll(ticket) == BUSY and left.notes() == []
    assert time.monotonic() - begin < 0.25
    assert finish(left, ticket) == DONE
    left.close()


# Two processes.


@contextmanager
def process(name: str, link: NixlLink):
    """Another process with a link, which has met ours."""
    command = [sys.executable, "-m", "tests.parallel.link_peer", name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert link.meet(bytes.fromhex(child.stdout.readline())) == name
        child.stdin.write(link.about().hex() + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "met\n"
        yield child
    finally:
        child.kill()
        child.wait()


def test_two_processes_and_the_death_of_one():
    """Scattered reads and writes with notes; kill -9: an error at once, no hang; another of that name is met again."""
    link = NixlLink("here", LinkSettings(progress=False))
    mine = torch.zeros(SIZE, dtype=torch.uint8)
    link.register(mine)
    rng = np.random.default_rng(0)
    here, there = (
        np.stack((np.zeros(300, np.int64), rng.permutation(1024)[:300] * 1000, np.full(300, 890)), 1) for _ in "ab"
    )
    with process("there", link) as child:
        assert finish(link, link.post("read", "there", here, there, b"read")) == DONE
        want = content("there")
        for (_, a, n), (_, b, _) in zip(here.tolist(), there.tolist()):
            assert (mine.numpy()[a : a + n] == want[b : b + n]).all()
        assert child.stdout.readline().split()[:2] == ["here", "read"]
        mine[:8] = 3
        span = np.array([[0, 0, 8]])
        assert finish(link, link.post("write", "there", span, span, b"wrote")) == DONE
        assert child.stdout.readline().split() == ["here", "wrote", "24"]
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        begin = time.monotonic()
        with pytest.raises(LinkError):
            finish(link, link.post("read", "there", here, there))
        with pytest.raises(PeerLost, match="peer there"):
            for _ in range(3):
                finish(link, link.post("read", "there", span, span, b"x"), limit_s=10)
        assert time.monotonic() - begin < 20
        assert link.notes() == []
    with process("there", link) as child:
        assert finish(link, link.post("read", "there", span, span)) == DONE
        assert (mine.numpy()[:8] == content("there")[:8]).all()
    link.close()
