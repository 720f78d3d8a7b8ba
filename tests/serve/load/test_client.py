"""Clients: over HTTP against a small server of raw SSE, in process against an engine that only echoes."""

import asyncio
import json

import numpy as np
import pytest

from serve.clock import LoopClock
from serve.load.client import HttpClient, LoadRequest, LocalClient, Usage
from serve.request import Abort, Finish, Outputs
from serve.schedule.pages import chain

REQUEST = LoadRequest(np.arange(10, dtype=np.int32), 3, affinity="s-1", seed=5)


def sse(*chunks):
    return "".join(f"data: {c if isinstance(c, str) else json.dumps(c)}\n\n" for c in chunks)


def tokens(text, **more):
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 8, "replayed_tokens": 2},
}
END = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
GOOD = sse(tokens("a"), tokens("bc", token_ids=[4, 5]), END, {"choices": [], "usage": USAGE}, "[DONE]")


class Server:
    """Answers /v1/models, and any completion with ``status`` and ``reply``; ``asked`` keeps (headers, body)."""

    def __init__(self, reply=GOOD, status="200 OK"):
        self.reply, self.status, self.asked = reply, status, []

    async def serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.startswith("content-length")), 0)
        body = await reader.readexactly(length)
        reply, status = '{"data": [{"id": "tiny"}]}', "200 OK"
        if head.startswith("post /v1/completions"):
            self.asked.append((head, json.loads(body)))
            reply, status = self.answer(self.asked[-1][1])
        writer.write(
            f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{reply}".encode()
        )
        await writer.drain()
        writer.close()

    def answer(self, body):
        return self.reply, self.status

    async def ask(self, **how):
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            came = []
            async with HttpClient(url, LoopClock(), **how) as client:
                usage = await client.complete(REQUEST, lambda at, n: came.append((at, n)))
        return usage, came


def test_http_stream():
    server = Server()
    usage, came = asyncio.run(server.ask(key="secret"))
    assert usage == Usage("length", 10, 3, 8, 2)
    assert [n for _, n in came] == [1, 2] and came[0][0] <= came[1][0]
    head, body = server.asked[0]
    assert "x-session-affinity: s-1" in head and "authorization: bearer secret" in head
    assert body == {
        "model": "tiny", "prompt": list(range(10)), "max_tokens": 3, "temperature": 0.0, "seed": 5, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
def test_a_server_that_refuses_token_ids_is_asked_without(status):
    class Strict(Server):
        """Refuses what names the field, however often it comes."""

        def answer(self, body):
            return ('{"error": "extra: return_token_ids"}', status) if "return_token_ids" in body else (GOOD, "200 OK")

    server = Strict()
    usage, came = asyncio.run(server.ask(model="tiny"))
    assert usage == Usage("length", 10, 3, 8, 2) and len(came) == 2
    assert ["return_token_ids" in body for _, body in server.asked] == [True, False]


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        ('{"error": {"message": "prompt is too long"}}', "400 Bad Request", "400: .*too long"),
        (sse(tokens("a"), {"error": {"message": "engine died"}}), "200 OK", "engine died"),
        (sse(tokens("a")), "200 OK", "without a finish_reason and usage"),
        (sse("{"), "200 OK", "JSONDecodeError"),
    ],
)
def test_http_failures_are_usages(reply, status, message):
    usage, _ = asyncio.run(Server(reply, status).ask())
    assert usage.finish == "error"
    with pytest.raises(ValueError, match=message):
        raise ValueError(usage.message)


def test_no_server():
    async def go():
        async with HttpClient("http://127.0.0.1:9", LoopClock()):
            pass

    with pytest.raises(ValueError, match=r"target=http://127.0.0.1:9: .*does not answer"):
        asyncio.run(go())


# --- in process ---


async def echo(client, asks, stall=False):
    """An engine that gives each request its first tokens, two at a time."""
    box = client.mailbox
    while True:
        await box.wait()
        for ask in box.take():
            asks.append(ask)
            if isinstance(ask, Abort) or stall:
                continue
            total = ask.sampling.max_tokens
            for at in range(0, total, 2):
                part = ask.tokens[at : min(at + 2, total)]
                last = [Finish(ask.handle, "length", 4, 1)] if at + 2 >= total else []
                box.put(
                    Outputs(np.array([ask.handle]), np.array([len(part)]), part, finished=last, stats={"step_s": 1.0})
                )


def test_local_client():
    async def go():
        client, asks, came = LocalClient(LoopClock(), 4), [], []
        engine = asyncio.create_task(echo(client, asks))
        usage = await client.complete(REQUEST, lambda at, n: came.append(n))
        engine.cancel()
        return client, asks, came, usage

    client, asks, came, usage = asyncio.run(go())
    assert usage == Usage("length", 10, 3, 4, 1) and came == [2, 1]
    assert asks[0].hashes == chain(REQUEST.tokens, 4) and asks[0].sampling.seed == 5 and asks[0].sampling.stop_ids == ()
    assert [(s.requests, s.tokens, s.stats) for s in client.steps] == [(1, 2, {"step_s": 1.0}), (1, 1, {"step_s": 1.0})]


def test_local_cancel_aborts():
    async def go():
        client, asks = LocalClient(LoopClock(), 4), []
        engine = asyncio.create_task(echo(client, asks, stall=True))
        task = asyncio.create_task(client.complete(REQUEST, lambda at, n: None))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.01)
        client.deliver(Outputs(np.array([1]), np.array([1]), np.array([3]), finished=[Finish(1, "abort")]))
        engine.cancel()
        return asks

    asks = asyncio.run(go())
    assert asks[1] == Abort(asks[0].handle)
