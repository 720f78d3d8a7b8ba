"""Open and closed loops under virtual time, and the endless cache that the theoretical hit rate comes from."""

import numpy as np
import pytest

from serve.clock import LoopClock
from serve.load.client import LoadRequest
from serve.load.drive import Driver, closed_loop, open_loop
from serve.load.theory import Endless
from tests.serve.load.virtual import FakeClient, play


def request(i, tokens=8, out=4):
    return LoadRequest(np.full(tokens, i, np.int32), out, turn=i)


def drive(loop, *how, client=None, **limits):
    client = client or FakeClient(per_prompt=0.0, per_token=1.0)

    async def go():
        driver = Driver(client, LoopClock(), page_size=4, **limits)
        await loop(driver, *how)
        return driver.records

    return play(go()), client


def test_open_loop_keeps_its_times():
    plan = [(float(i), request(i)) for i in range(5)]
    records, _ = drive(open_loop, plan, None, 0.0)
    assert [r.sent_s for r in records] == [0, 1, 2, 3, 4]
    assert [r.end_s for r in records] == [4, 5, 6, 7, 8]
    assert records[0].arrivals == [(0, 1), (1, 1), (2, 1), (3, 1)] and records[0].ok


def test_closed_loop_keeps_so_many_in_flight():
    records, _ = drive(closed_loop, [request(i) for i in range(7)], 3, None, 0.0)
    assert [r.sent_s for r in records] == [0, 0, 0, 4, 4, 4, 8]


@pytest.mark.parametrize("loop", [open_loop, closed_loop])
def test_duration_and_drain(loop):
    how = ([(float(i), request(i)) for i in range(99)],) if loop is open_loop else ([request(i) for i in range(99)], 2)
    records, client = drive(loop, *how, 5.5, 1.0)
    assert client.open == 0 and max(r.sent_s for r in records) <= 5.5
    assert all(r.usage is None or r.end_s <= 6.5 for r in records) and any(r.usage is None for r in records)


def test_limit_and_on_end():
    ended = []
    records, _ = drive(closed_loop, [request(i) for i in range(9)], 2, None, 100.0, max_requests=5, on_end=ended.append)
    assert len(records) == 5 and len(ended) == 5


def test_failures_are_records_and_slips_are_errors():
    records, _ = drive(closed_loop, [request(0)], 1, None, 0.0, client=FakeClient(fails=lambda r: "no"))
    assert records[0].failed and records[0].usage.message == "no"

    def slip(request):
        raise RuntimeError("a slip")

    with pytest.raises(RuntimeError, match="a slip"):
        drive(closed_loop, [request(0)], 1, None, 0.0, client=FakeClient(fails=slip))


def test_endless_cache():
    cache, a = Endless(4), np.arange(12, dtype=np.int32)
    assert cache.look(a) == 0
    assert cache.look(a) == 8  # a token is left to compute
    assert cache.look(np.append(a, 1)) == 12
    assert cache.look(np.append(a[:6], 99)) == 4
    assert cache.look(a[1:]) == 0
    assert cache.look(np.append(a[:8], [1, 2, 3, 4, 5])) == 8
    assert cache.look(np.append(a[:8], [1, 2, 3, 4, 5])) == 12
