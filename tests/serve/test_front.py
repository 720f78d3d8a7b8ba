"""The front end against an engine that answers known text: handles, stops, n, bounds, aborts, failure."""

import asyncio
from contextlib import asynccontextmanager
from itertools import count

import numpy as np
import pytest

from scripts.bytetext import ByteText
from serve.front import BadField, Bounds, Busy, Closed, Front
from serve.mailbox import Mailbox
from serve.request import Sampling
from serve.schedule.pages import chain
from serve.writer import Stops
from tests.serve.fake import FakeEngine, Running, babble, logprob, script

TEXT = ByteText(512, 0, 1)
BOUNDS = Bounds(vocab_size=512, context=256, page_size=4, max_waiting=8, max_prompt_tokens=400)


@asynccontextmanager
async def serving(answer="Hello, world. ", bounds=BOUNDS, **engine):
    """A front end and a running engine of one event loop; at the end nothing may be left open."""
    clock = count()
    front = Front(bounds, lambda: float(next(clock)), TEXT.stream)
    mailbox = Mailbox(front.deliver)
    front.connect(mailbox.send)
    fake = FakeEngine(mailbox, script(answer, TEXT.encode) if isinstance(answer, str) else answer, **engine)
    task = asyncio.create_task(fake.run())
    try:
        yield front, fake
        await asyncio.wait_for(front.idle(), 5)
        assert (front.open, front.waiting, front.prompt_tokens, fake.running) == (0, 0, 0, {})
    finally:
        task.cancel()


def prompt(text: str = "abcdefgh") -> np.ndarray:
    return np.array(TEXT.prompt(text), np.int32)


async def collect(stream, n: int = 1) -> list[dict]:
    """Each completion's text, tokens, log-probabilities and last event."""
    done = [{"text": "", "tokens": [], "chosen": [], "prompt": [], "last": None} for _ in range(n)]
    async for event in stream:
        one = done[event.index]
        assert one["last"] is None, "nothing comes after the finish"
        one["text"] += event.text
        one["tokens"] += event.tokens
        for name, got in (("chosen", event.logprobs), ("prompt", event.prompt_logprobs)):
            one[name] += [] if got is None else got.chosen.tolist()
        one["last"] = event if event.finish else None
    return done


FORTY = Sampling(40)


def one(answer="Hello, world. ", sampling=FORTY, engine=None, **submit) -> dict:
    async def go():
        async with serving(answer, **(engine or {})) as (front, _):
            return (await collect(front.submit(prompt(), sampling, **submit)))[0]

    return asyncio.run(go())


def test_a_completion():
    got = one()
    assert got["text"] == "Hello, world. " * 2 + "Hello, world"
    assert TEXT.encode(got["text"]) == got["tokens"]
    last = got["last"]
    assert (last.finish, last.completion_tokens, last.cached_tokens) == ("length", 40, 4)


@pytest.mark.parametrize("most", [1, 3, 50])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", ["string", "engine id", "kept id"])
def test_stops_by_kind_and_step_size(kind, include, most):
    comma = TEXT.encode(",")[0]
    how = {"engine": {"most": most}, "include_stop": include}
    if kind == "string":
        got = one(stop=["lo, w"], **how)
        assert got["text"] == ("Hello, w" if include else "Hel")
        assert got["tokens"] == TEXT.encode("Hello, w")
    elif kind == "kept id":
        got = one(kept_stop_ids=[comma], **how)
        assert (got["text"], got["tokens"]) == ("Hello,", TEXT.encode("Hello,"))
    else:
        got = one(sampling=Sampling(40, stop_ids=(comma,)), **how)
        assert (got["text"], got["tokens"]) == ("Hello", TEXT.encode("Hello"))
    assert got["last"].finish == "stop" and got["last"].completion_tokens == len(got["tokens"])


def test_stops_wait_for_min_tokens():
    assert one(sampling=Sampling(40, min_tokens=6), stop=[","])["text"] == "Hello"
    assert one(sampling=Sampling(40, min_tokens=7), stop=[","])["text"] == "Hello, world. Hello"


def test_n_equals_n_single_requests():
    sampling = Sampling(12, 1.0, seed=2**63 - 2)

    async def go():
        async with serving(babble(512)) as (front, fake):
            together = await collect(front.submit(prompt(), sampling, n=4), 4)
            assert len({a.handle for a in fake.asks}) == 4
            seeds = [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1]
            assert [a.sampling.seed for a in fake.asks] == seeds
            alone = [(await collect(front.submit(prompt(), Sampling(12, 1.0, seed=s))))[0] for s in seeds]
        assert [t["tokens"] for t in together] == [a["tokens"] for a in alone]
        assert len({str(t["tokens"]) for t in together}) == 4

    asyncio.run(go())


def test_several_prompts_have_an_index_each_and_page_hashes():
    prompts = [prompt("abcdefgh"), prompt("xy")]

    async def go():
        async with serving(babble(512)) as (front, fake):
            got = await collect(front.submit_all(prompts, Sampling(5), Stops(), n=2), 4)
            single = [(await collect(front.submit(p, Sampling(5))))[0] for p in prompts]
            assert [a.hashes for a in fake.asks[:4:2]] == [chain(p, 4) for p in prompts]
            assert fake.asks[0].tokens.dtype == np.int32
        assert [g["tokens"] for g in got] == [single[i]["tokens"] for i in (0, 0, 1, 1)]

    asyncio.run(go())


@pytest.mark.parametrize("most", [1, 4])
def test_logprobs_are_as_many_as_tokens(most):
    got = one(sampling=Sampling(40, logprobs=2, prompt_logprobs=0), stop=["world"], engine={"most": most})
    tokens = TEXT.encode("Hello, world")
    assert got["tokens"] == tokens
    assert got["chosen"] == [logprob(t, len(prompt()) + i) for i, t in enumerate(tokens)]
    assert got["prompt"] == [logprob(t, 1 + i) for i, t in enumerate(prompt()[1:].tolist())]


def test_a_limit_of_no_tokens():
    got = one(sampling=Sampling(1, logprobs=1, prompt_logprobs=1), limit=0)
    assert got["tokens"] == [] and len(got["prompt"]) == 8
    assert (got["last"].finish, got["last"].completion_tokens) == ("length", 0)


def test_abort_returns_what_there_is():
    async def go():
        async with serving(most=1) as (front, _):
            stream, got, last = front.submit(prompt(), Sampling(200)), [], None
            async for event in stream:
                got += event.tokens
                last = event
                if len(got) == 5:
                    stream.abort()
            assert last.finish == "abort" and last.completion_tokens == len(got) < 200

    asyncio.run(go())


def test_a_closed_stream_is_aborted_and_silent():
    async def go():
        async with serving() as (front, _):
            stream = front.submit(prompt(), Sampling(200), n=3)
            await anext(stream)
            stream.close()
            assert [e async for e in stream] == []

    asyncio.run(go())


BAD = [
    ([], {}, "prompt", "is empty"),
    ([1, 512], {}, "prompt", "token id 512"),
    ([-1], {}, "prompt", "token id -1"),
    ([1] * 256, {}, "prompt", "256 tokens; the context is 256"),
    ([1] * 250, {}, "max_tokens", "give max_tokens <= 6"),
    ([1], {"stop": [""]}, "stop", "1 to 256 characters"),
    ([1], {"stop": ["a"] * 17}, "stop", "up to 16"),
    ([1], {"kept_stop_ids": [999]}, "stop_token_ids", "0 to 511"),
    ([1], {"n": 0}, "n", ">= 1"),
    ([1], {"n": 9}, "n", "9 completions"),
    ([1] * 100, {"n": 5}, "prompt", "500 tokens"),
]


@pytest.mark.parametrize(("tokens", "how", "field", "message"), BAD, ids=lambda v: str(v)[:12])
def test_bad_requests_name_the_field(tokens, how, field, message):
    async def go():
        async with serving() as (front, fake):
            with pytest.raises(BadField, match=message) as error:
                front.submit(np.array(tokens, np.int32), Sampling(7), **how)
            assert error.value.field == field and fake.asks == []

    asyncio.run(go())


def test_failure_38_the_queue_is_bounded_in_requests_and_in_tokens():
    async def go():
        async with serving() as (front, _):
            first = front.submit(prompt(), Sampling(5), n=8)
            with pytest.raises(Busy):
                front.submit(prompt(), Sampling(5))
            await collect(first, 8)
            long = [front.submit(np.ones(190, np.int32), Sampling(5)) for _ in range(2)]
            with pytest.raises(Busy, match="380 tokens"):
                front.submit(np.ones(100, np.int32), Sampling(5))
            for stream in long:
                await collect(stream)
            assert (await collect(front.submit(np.ones(100, np.int32), Sampling(5))))[0]["last"].finish == "length"

    asyncio.run(go())


def test_an_engine_that_dies_ends_every_request():
    async def go():
        async with serving() as (front, fake):
            streams = [front.submit(prompt(), Sampling(200), n=2), front.submit(prompt(), Sampling(200))]
            await anext(streams[0])
            front.fail("the engine is gone")
            last = [[e async for e in s][-1] for s in streams]
            assert [(e.finish, e.message) for e in last] == [("error", "the engine is gone")] * 2
            with pytest.raises(Closed, match="gone"):
                front.submit(prompt(), Sampling(1))
            fake.running.clear()

    asyncio.run(go())


def test_failure_34_outputs_of_unknown_handles_are_dropped():
    async def go():
        async with serving(most=1) as (front, fake):
            stream = front.submit(prompt(), Sampling(30))
            handle = stream.parts[0].handle
            await anext(stream)
            front.deliver(fake.outputs([]))  # as if late
            stream.close()
            await front.idle()
            fake.running[handle] = Running(fake.asks[0], fake.answer(fake.asks[0]), 0, 1 << 20)
            front.deliver(fake.outputs([]))
            fake.running.clear()

    asyncio.run(go())


def test_what_the_server_cuts_is_no_answer():
    """A client's own abort stays one."""

    async def go():
        async with serving(pause_s=0.01) as (front, _):
            cut, own = (front.submit(prompt(), Sampling(100)) for _ in range(2))
            own.abort()
            front.abort_all("the server has shut down")
            events = [[e async for e in stream][-1] for stream in (cut, own)]
            assert [e.finish for e in events] == ["error", "abort"]
            assert events[0].unavailable and events[0].message == "the server has shut down"

    asyncio.run(go())
