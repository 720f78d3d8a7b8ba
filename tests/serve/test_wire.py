"""The wire: what is sent arrives, what is broken is dropped and counted."""

import asyncio
from dataclasses import fields, is_dataclass

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from serve.request import Abort, Ask, Bye, Finish, Logprobs, Outputs, Pause, Sampling
from serve.wire import codec as wire
from serve.wire.codec import Failed, Hello, Ping, Pong, decode, encode
from serve.wire.pair import EngineWire, FrontWire


def rows(n: int, k: int) -> Logprobs:
    return Logprobs(np.arange(n, dtype=np.float32), np.ones((n, k), np.int32), np.zeros((n, k), np.float32))


OUTPUTS = Outputs(
    np.array([3, 9], np.int64),
    np.array([1, 2], np.int32),
    np.array([7, 8, 9], np.int32),
    {3: rows(1, 0), 9: rows(2, 4)},
    {9: rows(5, 1)},
    [Finish(3, "stop", 2, 1, "why")],
    {"running": 2.0},
)
ASK = Ask(5, np.arange(4, dtype=np.int32), [b"x" * 16], Sampling(8, 0.5, -3, (1, 2), logprobs=0), 2)
LONG = Ask(6, np.arange(100_000, dtype=np.int32), [], Sampling(1))
EVERY = [ASK, LONG, Abort(7), Pause(False), Bye(), OUTPUTS, Hello(512, 1024, 64), Failed("why", True), Ping(), Pong()]
KINDS = (*wire.TO_ENGINE, *wire.TO_FRONT)


def equal(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if is_dataclass(a):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("message", EVERY, ids=lambda m: type(m).__name__)
def test_what_is_sent_arrives(message):
    assert equal(decode(encode(message), KINDS), message)


def test_long_prompts_travel_in_a_frame_of_their_own():
    assert len(encode(LONG)) == 3 and len(encode(ASK)) == 2
    assert decode(encode(LONG), KINDS).tokens.base is not None, "not copied"


def body(**changes) -> bytes:
    """An Ask's body with some fields exchanged."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(ASK)[1]) | changes)


BROKEN = [
    [b"ask"],
    [b"nonsense", b""],
    [b"hello", encode(Hello(1, 2, 3))[1]],  # the wrong way
    [b"ask", b""],
    [b"ask", b"\xc1"],
    [b"ask", encode(Abort(1))[1]],
    [b"ask", body(handle="7")],
    [b"ask", body(tokens=[1, 2, 3])],
    [b"ask", body(tokens=("int32", (4,), b"short"))],
    [b"ask", body(tokens=("int64", (1,), b"8 bytes!"))],
    [b"ask", body(tokens=("object", (1,), b"8 bytes!"))],
    [b"ask", body(tokens=("int32", (-1,), b"1234"))],
    [b"ask", body(tokens=("int32", (0,), b""))],
    [b"ask", body(tokens=("int32", (1,), 5))],
    [b"ask", body(tokens=("int32", 3, b"1234"))],
    [b"ask", body(tokens=None)],
    [b"ask", body(sampling={"max_tokens": 0})],
    [b"ask", body(sampling={"max_tokens": 1, "temperature": float("nan")})],
    [b"ask", b"\x91" * 100_000],
]


@pytest.mark.parametrize("frames", BROKEN, ids=range(len(BROKEN)))
def test_broken_messages_are_value_errors(frames):
    with pytest.raises(ValueError):
        decode(frames, wire.TO_ENGINE)


def test_outputs_whose_parts_do_not_fit_are_refused():
    bad = Outputs(OUTPUTS.handles, OUTPUTS.counts + 1, OUTPUTS.tokens)
    worse = Outputs(OUTPUTS.handles, OUTPUTS.counts, OUTPUTS.tokens, {3: Logprobs(*[np.zeros(1, np.float32)] * 3)})
    for message in (bad, worse):
        with pytest.raises(ValueError):
            encode(message)


def test_outputs_are_sent_in_the_promised_dtypes():
    wide = Outputs(*(a.astype(np.int64) for a in (OUTPUTS.handles, OUTPUTS.counts, OUTPUTS.tokens)))
    got = decode(encode(wide), wire.TO_FRONT)
    assert (got.handles.dtype, got.counts.dtype, got.tokens.dtype) == (np.int64, np.int32, np.int32)


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=4), st.sampled_from(wire.TO_ENGINE))
def test_any_bytes_are_a_message_or_a_value_error(frames, kind):
    for attempt in (frames, [kind, *frames], [kind, encode(ASK)[1][:-1], *frames]):
        try:
            decode(attempt, wire.TO_ENGINE)
        except ValueError:
            pass


def test_a_message_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(wire, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="1000 may be sent"):
        encode(LONG)


def test_both_ways_over_a_socket(tmp_path):
    async def go():
        address = f"ipc://{tmp_path}/engine"
        front, engine = FrontWire(address), EngineWire(address)
        engine.put(Hello(1, 2, 3))
        assert await front.receive() == Hello(1, 2, 3)
        for message in (ASK, LONG, Abort(7)):
            front.send(message)
        got = []
        while len(got) < 3:
            await engine.wait()
            got += engine.take()
        assert all(map(equal, got, (ASK, LONG, Abort(7)))) and engine.take() == []
        seen = []
        pump = asyncio.create_task(front.pump(seen.append))
        engine.put(OUTPUTS)
        engine._socket.send_multipart([b"outputs", b"garbage"])
        engine.put(OUTPUTS)
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        assert all(equal(s, OUTPUTS) for s in seen) and front.malformed == 1
        pump.cancel()
        front.send(Bye())
        await engine.wait()
        assert engine.take() == [Bye()]
        front.send(Ping())
        await engine.wait()
        assert engine.take() == [] and await front.receive() == Pong()
        engine.close()
        front.close()

    asyncio.run(go())


def test_the_engine_survives_garbage_and_the_front_end_a_dead_engine(tmp_path):
    async def go():
        address = f"ipc://{tmp_path}/engine"
        context = zmq.Context()
        rude = context.socket(zmq.PAIR)
        rude.bind(address)
        engine = EngineWire(address)
        for frames in BROKEN:
            rude.send_multipart(frames)
        rude.send_multipart(encode(Abort(1)))
        got = []
        while not got:
            await engine.wait()
            got += engine.take()
        assert got == [Abort(1)] and engine.malformed == len(BROKEN)
        engine.close()
        rude.close()
        context.term()
        front = FrontWire(address)
        front.send(Abort(1))
        assert front.undelivered == 1
        front.close()

    asyncio.run(go())
