"""Whatever is sent, the answer is a 4xx that names the field, never a 5xx."""

import asyncio
import json

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve.api.app import create_app
from serve.text import Text
from tests.serve.served import make, run, serve

SHIPPED = Text.load("model/checkpoints/tiny")
GOOD = {"model": "tiny", "prompt": "abc", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
HI = {"role": "user", "content": "Hi"}


def ask(path: str, raw: bytes, headers: dict | None = None, **how) -> httpx.Response:
    """One request, without a socket."""

    async def go():
        service, engine = make(text=SHIPPED, **how)
        task = asyncio.create_task(engine.run())
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        async with (
            asyncio.timeout(20),
            httpx.AsyncClient(transport=transport, base_url="http://x", verify=False) as http,
        ):
            answer = await http.post(path, content=raw, headers=headers)
            if answer.status_code >= 400:
                assert engine.asks == [], "nothing reaches the engine"
            await service.offers[0].front.idle()
        task.cancel()
        return answer

    return asyncio.run(go())


FIELDS = [
    ({"prompt": None}, "prompt", "must be a string, a list"),
    ({"prompt": []}, "prompt", "must be a string, a list"),
    ({"prompt": 5}, "prompt", "must be a string, a list"),
    ({"prompt": ["a", [1]]}, "prompt", "strings only, or token ids only"),
    ({"prompt": [1, "a"]}, "prompt", "no token id"),
    ({"prompt": [1, 1.5]}, "prompt", "no token id"),
    ({"prompt": [True, 1]}, "prompt", "strings only"),
    ({"prompt": [1, 10**30]}, "prompt", "no token id from 0 to 2047"),
    ({"prompt": [[]]}, "prompt", "is empty"),
    ({"prompt": [-1]}, "prompt", "no token id"),
    ({"prompt": "x\ud800"}, "prompt", "half a surrogate pair at character 1"),
    ({"prompt": [1] * 512}, "prompt", "512 tokens"),
    ({"prompt": ["a"] * 3000}, "prompt", "2048 may be sent"),
    ({"max_tokens": 0}, "max_tokens", ">= 1 unless echo"),
    ({"max_tokens": -1}, "max_tokens", "0 to 512, got -1"),
    ({"max_tokens": 511}, "max_tokens", "give max_tokens <="),
    ({"max_tokens": 2.0}, "max_tokens", "must be an integer, got a number"),
    ({"max_tokens": "2"}, "max_tokens", "got a string"),
    ({"max_tokens": True}, "max_tokens", "got a boolean"),
    ({"temperature": -0.1}, "temperature", "0 to 100"),
    ({"temperature": []}, "temperature", "must be a number, got a list"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.01}, "top_p", "0 to 1"),
    ({"top_k": -2}, "top_k", "-1 to"),
    ({"seed": 2**63}, "seed", "must be"),
    ({"seed": 1.5}, "seed", "an integer"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": 100}, "n", "100 completions"),
    ({"min_tokens": 3}, "min_tokens", "0 to 2"),
    ({"stop": ""}, "stop", "1 to 256 characters"),
    ({"stop": ["a", 1]}, "stop", "a list of strings"),
    ({"stop": {"a": 1}}, "stop", "got an object"),
    ({"stop": ["a"] * 17}, "stop", "up to 16 strings"),
    ({"stop_token_ids": [2048]}, "stop_token_ids", "0 to 2047"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids", "integers"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": True}, "logprobs", "an integer"),
    ({"best_of": 2}, "best_of", "only 1"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"echo": "yes"}, "echo", "true or false"),
    ({"stream": 1}, "stream", "true or false"),
    ({"stream_options": True}, "stream_options", "an object"),
    ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"presence_penalty": 0.1}, "presence_penalty", "only 0"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "only 1"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "only {}"),
    ({"temprature": 1}, "temprature", "unknown field"),
    ({"model": "gpt-4"}, "model", "no model 'gpt-4'"),
    ({"model": 5}, "model", "must be a string"),
]
CHATS = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "Hi"}, "messages", "a list"),
    ({"messages": ["Hi"]}, "messages[0]", "an object"),
    ({"messages": [HI, {"role": "tool", "content": "x"}]}, "messages[1].role", "must be system"),
    ({"messages": [HI, {"role": "user"}]}, "messages[1].content", "a string or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "text alone"),
    ({"messages": [HI | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "not supported"),
    ({"messages": [HI | {"colour": 1}]}, "messages[0].colour", "unknown"),
    ({"messages": [HI | {"content": "\udfff"}]}, "messages[0].content", "surrogate"),
    ({"messages": [HI | {"content": "word " * 600}]}, "messages", "the context is 512"),
    ({"max_tokens": 0}, "max_tokens", "1 to 512"),
    ({"max_tokens": 512}, "max_tokens", "give max_tokens <="),
    ({"max_tokens": None, "max_completion_tokens": 512}, "max_completion_tokens", "give max_tokens <="),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": 2}, "logprobs", "true or false"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unknown field"),
    ({"echo": True}, "echo", "unknown field"),
]


@pytest.mark.parametrize(("change", "param", "message"), FIELDS + CHATS, ids=lambda v: str(v)[:30])
def test_a_bad_field_is_named(change, param, message):
    chat = any(change is c[0] for c in CHATS)
    raw = json.dumps((CHAT if chat else GOOD) | change).encode()
    answer = ask("/v1/chat/completions" if chat else "/v1/completions", raw)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param, error
    assert message in error["message"] and error["message"].startswith((param, "unknown field", "no model", "the body"))


BODIES = [
    (b"", "not JSON"),
    (b"[]", "must be a JSON object, got a list"),
    (b"nonsense", "not JSON"),
    (b'{"prompt": "a"', "not JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b'{"temperature": NaN}', "NaN is no JSON"),
    (b'{"temperature": -Infinity}', "no JSON"),
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"prompt": ' + b"[" * 200_000 + b"}", "nested too deeply"),
    (b'{"a":' * 50_000, "nested too deeply"),
]


@pytest.mark.parametrize(("raw", "message"), BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_bad_body_is_a_400(path, raw, message):
    answer = ask(path, raw)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_numbers_of_json_that_are_not_finite():
    answer = ask("/v1/completions", b'{"prompt": "a", "temperature": 1e400}')
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"


def test_harmless_fields_are_taken():
    extra = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "best_of": 1,
        "presence_penalty": 0,
        "logit_bias": {},
    }
    assert ask("/v1/completions", json.dumps(GOOD | extra | {"seed": None, "stop": None}).encode()).status_code == 200
    extra = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    assert ask("/v1/chat/completions", json.dumps(CHAT | extra).encode()).status_code == 200


def test_detokenize_takes_ids_alone():
    for value in ("ab", None, [1, "a"], [5000], [[1]]):
        answer = ask("/detokenize", json.dumps({"tokens": value}).encode())
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"


def test_a_body_over_the_limit_is_a_413_whether_it_says_so_or_not():
    big = json.dumps(GOOD | {"user": "x" * 2000}).encode()
    assert ask("/v1/completions", big, max_body_bytes=1000).status_code == 413

    async def go():
        async with serve(max_body_bytes=1000, body_timeout_s=0.2) as served:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            told = await served.raw(head + b"content-length: 99999\r\n\r\n")
            chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
            untold = await served.raw(head + b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n")
            assert b" 413 " in told.splitlines()[0] and b" 413 " in untold.splitlines()[0]
            slow = await served.raw(head + b"content-length: 10\r\n\r\n{")
            assert b" 408 " in slow.splitlines()[0]
            assert b" 400 " in (await served.raw(b"nonsense\r\n\r\n")).splitlines()[0]

    run(go)


def test_unknown_paths_and_methods_have_the_same_shape():
    async def go():
        async with serve() as served, httpx.AsyncClient(base_url=served.url, verify=False) as http:
            for method, path, status in (
                ("GET", "/x", 404),
                ("GET", "/v1/completions", 405),
                ("GET", "/v1/models/x", 404),
            ):
                answer = await http.request(method, path)
                assert answer.status_code == status and answer.json()["error"]["message"]

    run(go)


# --- random bodies ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({k for c, _, _ in FIELDS + CHATS for k in c} | {"ignore_eos", "priority", "include_stop_str_in_output"})


@settings(max_examples=150)
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4),
    st.booleans(),
)
@example("/v1/completions", {"prompt": "\x00"}, True)
@example("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ue0010\ue002"}]}, True)
def test_random_bodies_are_never_a_5xx(path, changes, good):
    base = {} if not good else CHAT if "chat" in path else GOOD
    answer = ask(path, json.dumps(base | changes).encode())
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]


@given(st.binary(max_size=40))
def test_random_bytes_are_never_a_5xx(raw):
    assert 400 <= ask("/v1/completions", raw).status_code < 500


def test_a_text_that_is_too_long_for_certain_is_refused_before_it_is_tokenized(monkeypatch):
    async def go():
        async with serve() as served:
            text = type(served.service.offers[0].text)
            for name in ("prompt", "encode"):
                monkeypatch.setattr(text, name, None)  # would raise
            async with httpx.AsyncClient(base_url=served.url) as http:
                bodies = {"prompt": "a " * 4096}, {"prompt": ["b", "a" * 9000]}
                for path, body in [*(("/v1/completions", b) for b in bodies), ("/tokenize", bodies[0])]:
                    answer = await http.post(path, json=body)
                    assert answer.status_code == 400 and "tokens or more; the context is 512" in answer.text

    run(go)
