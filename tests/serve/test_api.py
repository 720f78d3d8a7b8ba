"""The HTTP server as clients see it: the official client, the form of answers, stops, usage, log-probabilities."""

import asyncio
import json

import httpx
import openai
import pytest

from serve.text import Text
from tests.serve.fake import babble, logprob
from tests.serve.served import ANSWER, BYTES, Served, run, serve

SHIPPED = Text.load("model/checkpoints/tiny")
PROMPT = "abc"
STEPS = [1, 4, 100]


def client(served: Served, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


async def post(served: Served, path: str, body: dict | bytes, **how) -> httpx.Response:
    async with httpx.AsyncClient(verify=False) as http:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await http.post(served.url + path, content=raw, timeout=20, **how)


async def events(served: Served, path: str, body: dict) -> list[dict]:
    """The chunks of a stream, which must end with [DONE]."""
    answer = await post(served, path, body | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks: list[dict], index: int = 0) -> dict:
    """What the chunks of one choice add up to."""
    out = {"text": "", "finish_reason": None, "tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                assert out["finish_reason"] is None
                out["text"] += choice["text"]
                out["finish_reason"] = choice["finish_reason"]
                for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                    out[name] += (choice["logprobs"] or {}).get(name, [])
    return out


# --- the official client ---


def test_openai_client_completions():
    async def go():
        async with serve() as served, client(served) as api:
            whole = await api.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
            assert whole.choices[0].text == (ANSWER * 2)[:20] and whole.choices[0].finish_reason == "length"
            assert whole.usage.prompt_tokens == 4 and whole.usage.completion_tokens == 20
            assert whole.usage.prompt_tokens_details.cached_tokens == 2 and whole.id == "cmpl-0"
            options = {"include_usage": True}
            stream = await api.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=20, stream=True, stream_options=options
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
            assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
            assert all(c.usage is None for c in chunks[:-1])

    run(go)


def test_openai_client_chat():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]

    async def go():
        async with serve(text=SHIPPED) as served, client(served) as api:
            ask = {
                "model": "tiny",
                "messages": messages,
                "max_completion_tokens": 6,
                "logprobs": True,
                "top_logprobs": 2,
            }
            whole = await api.chat.completions.create(**ask)
            choice = whole.choices[0]
            assert choice.message.role == "assistant" and ANSWER.startswith(choice.message.content[:5])
            assert len(choice.logprobs.content) == whole.usage.completion_tokens == 6
            assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
            assert [len(t.top_logprobs) for t in choice.logprobs.content] == [2] * 6
            prompt = SHIPPED.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
            assert served.engine.asks[0].tokens.tolist() == prompt
            chunks = [c async for c in await api.chat.completions.create(**ask, stream=True)]
            assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            content = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
            assert text == choice.message.content and content == choice.logprobs.content

    run(go)


def test_openai_client_sees_errors_and_models():
    async def go():
        async with serve() as served, client(served) as api:
            assert [m.id async for m in api.models.list()] == ["tiny"]
            assert (await api.models.retrieve("tiny")).id == "tiny"
            with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as error:
                await api.completions.create(model="other", prompt=PROMPT)
            assert (error.value.param, error.value.code) == ("model", "model_not_found")
            with pytest.raises(openai.BadRequestError, match="frequency_penalty is not supported: only 0"):
                await api.completions.create(model="tiny", prompt=PROMPT, frequency_penalty=0.5)
            with pytest.raises(openai.BadRequestError, match=r"without one") as error:
                await api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
            assert error.value.param == "messages"

    run(go)


# --- stops, n, usage ---


@pytest.mark.parametrize("most", STEPS)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", ["string", "id"])
def test_failure_41_stops_are_the_same_streamed_and_not(kind, include, most):
    comma = BYTES.encode(",")[0]
    stop = {"stop": ["lo, w", "zzz"]} if kind == "string" else {"stop_token_ids": [comma]}
    tokens = "Hello, w" if kind == "string" else "Hello," if include else "Hello"
    text = {("string", False): "Hel", ("string", True): "Hello, w", ("id", False): "Hello", ("id", True): "Hello,"}
    body = {"prompt": PROMPT, "max_tokens": 40, "logprobs": 1, "include_stop_str_in_output": include, **stop}

    async def go():
        async with serve(engine={"most": most}) as served:
            answer = (await post(served, "/v1/completions", body)).json()
            choice = answer["choices"][0]
            chunks = await events(served, "/v1/completions", body | {"stream_options": {"include_usage": True}})
            streamed = joined(chunks)
        assert choice["text"] == streamed["text"] == text[kind, include]
        assert choice["finish_reason"] == streamed["finish_reason"] == "stop"
        assert choice["logprobs"]["tokens"] == streamed["tokens"] == list(tokens)
        assert choice["logprobs"] == {name: streamed[name] for name in choice["logprobs"]}
        assert answer["usage"] == chunks[-1]["usage"] and answer["usage"]["completion_tokens"] == len(tokens)
        assert chunks[-1]["choices"] == []

    run(go)


@pytest.mark.parametrize("most", STEPS)
@pytest.mark.parametrize("chat", [False, True])
def test_ids_of_tokens_come_where_they_are_asked_for(chat, most):
    """With the text that they make, also of a character of several tokens; a stop string's own are the last."""
    text, path = (SHIPPED, "/v1/chat/completions") if chat else (BYTES, "/v1/completions")
    said = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": PROMPT}
    body = said | {"max_tokens": 40, "stop": ["z"]}

    async def go():
        async with serve("Hé, wörldz!", text=text, engine={"most": most}) as served:
            plain = (await post(served, path, body)).json()["choices"][0]
            whole = (await post(served, path, body | {"return_token_ids": True})).json()["choices"][0]
            assert plain == {k: v for k, v in whole.items() if k != "token_ids"} and "token_ids" not in plain
            assert text.decode(whole["token_ids"]) == "Hé, wörldz"
            chunks = [c for e in await events(served, path, body | {"return_token_ids": True}) for c in e["choices"]]
            assert not any("token_ids" in c for e in await events(served, path, body) for c in e["choices"])
            assert [i for c in chunks for i in c.get("token_ids", [])] == whole["token_ids"]
            for c in chunks:
                made = c["delta"].get("content", "") if chat else c["text"]
                assert text.decode(c.get("token_ids", [])).rstrip("z") == made
            refused = await post(served, path, body | {"return_token_ids": 1})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_token_ids"

    run(go)


def test_end_of_text_stops_unless_ignored():
    answer = lambda ask: [*BYTES.encode("abc"), 1, *BYTES.encode("def")] * 9  # noqa: E731

    async def go():
        async with serve(answer) as served:
            body = {"prompt": PROMPT, "max_tokens": 7}
            one = (await post(served, "/v1/completions", body)).json()["choices"][0]
            assert (one["text"], one["finish_reason"]) == ("abc", "stop")
            one = (await post(served, "/v1/completions", body | {"ignore_eos": True})).json()["choices"][0]
            assert (one["text"], one["finish_reason"]) == ("abc<1>def", "length")
            one = (await post(served, "/v1/completions", body | {"min_tokens": 4})).json()["choices"][0]
            assert (one["text"], one["finish_reason"]) == ("abc<1>def", "length")

    run(go)


def test_n_choices_equal_n_requests_and_usage_counts_the_prompt_once():
    async def go():
        async with serve(babble(512)) as served:
            body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 1, "ignore_eos": True}
            together = (await post(served, "/v1/completions", body | {"n": 3, "seed": 5})).json()
            alone = [(await post(served, "/v1/completions", body | {"seed": 5 + i})).json() for i in range(3)]
            assert [c["index"] for c in together["choices"]] == [0, 1, 2]
            assert [c["text"] for c in together["choices"]] == [a["choices"][0]["text"] for a in alone]
            assert len({c["text"] for c in together["choices"]}) == 3
            usage = together["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 27, 31)
            assert usage["prompt_tokens_details"]["cached_tokens"] <= 4
            chunks = await events(served, "/v1/completions", body | {"n": 3, "seed": 5})
            assert [joined(chunks, i)["text"] for i in range(3)] == [c["text"] for c in together["choices"]]
            unseeded = (await post(served, "/v1/completions", body)).json()["choices"][0]["text"]
            seven = (await post(served, "/v1/completions", body | {"seed": 7})).json()["choices"][0]["text"]
            assert unseeded == seven, "the seed of the port"

    run(go)


@pytest.mark.parametrize("prompt", [["ab", "cde"], [BYTES.prompt("ab"), BYTES.prompt("cde")]], ids=["texts", "ids"])
def test_lists_of_prompts(prompt):
    async def go():
        async with serve(babble(512)) as served:
            body = {"max_tokens": 5, "temperature": 0, "n": 2, "ignore_eos": True}
            answer = (await post(served, "/v1/completions", body | {"prompt": prompt})).json()
            alone = [(await post(served, "/v1/completions", body | {"prompt": p})).json() for p in prompt]
            assert [c["text"] for c in answer["choices"]] == [c["text"] for a in alone for c in a["choices"]]
            assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
            assert answer["usage"]["prompt_tokens"] == 3 + 4

    run(go)


# --- log-probabilities ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_scores_the_prompt_as_lm_eval_asks(max_tokens, stream):
    ids = BYTES.prompt("score é")[1:]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1234}

    async def go():
        async with serve() as served:
            if stream:
                one = joined(await events(served, "/v1/completions", body))
            else:
                choice = (await post(served, "/v1/completions", body)).json()["choices"][0]
                one = choice | choice["logprobs"]
        assert one["text"] == "score é" + ANSWER[:max_tokens]
        assert one["token_logprobs"][0] is None and one["top_logprobs"][0] is None
        tokens = ids + BYTES.encode(ANSWER[:max_tokens])
        assert one["token_logprobs"][1:] == [logprob(t, i) for i, t in enumerate(tokens) if i]
        assert one["tokens"][6:8] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert one["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 6, *range(7, 7 + max_tokens)]
        for token, value, top in zip(one["tokens"], one["token_logprobs"], one["top_logprobs"], strict=True):
            assert value is None or max(top.values()) == value == top[token]

    run(go)


def test_the_token_after_a_scored_prompt_comes_even_if_it_is_the_end_of_text():
    async def go():
        async with serve(lambda ask: [1] * 9) as served:
            body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 1}
            choice = (await post(served, "/v1/completions", body)).json()["choices"][0]
            assert choice["logprobs"]["tokens"] == ["<0>", "a", "b", "c", "<1>"]
            assert choice["text"] == "abc<1>" and choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
            assert [list(t or {}) for t in choice["logprobs"]["top_logprobs"]] == [[], ["a"], ["b"], ["c"], ["<1>"]]

    run(go)


def test_minus_infinity_becomes_a_number():
    from serve.api.answer import _finite

    assert _finite(float("-inf")) == -9999.0 and _finite(-1.5) == -1.5


# --- text ---


def test_failure_42_characters_of_several_tokens_and_line_separators():
    text = "日本\u2028\u2029🙂é "

    async def go():
        async with serve(text) as served:
            body = {"prompt": PROMPT, "max_tokens": len(BYTES.encode(text))}
            answer = await post(served, "/v1/completions", body | {"stream": True})
            assert answer.text.isascii()
            chunks = await events(served, "/v1/completions", body)
            assert joined(chunks)["text"] == text
            assert not any("\ufffd" in c["choices"][0]["text"] for c in chunks)
            cut = (await post(served, "/v1/completions", body | {"max_tokens": 1})).json()
            assert cut["choices"][0]["text"] == "\ufffd" and cut["usage"]["completion_tokens"] == 1

    run(go)


def test_tokenize_and_detokenize():
    async def go():
        async with serve(text=SHIPPED) as served:
            for body, ids in (
                ({"prompt": "def f"}, SHIPPED.prompt("def f")),
                ({"prompt": "def f", "add_special_tokens": False}, SHIPPED.encode("def f")),
                (
                    {"messages": [{"role": "user", "content": "<eos>"}]},
                    SHIPPED.chat([{"role": "user", "content": "<eos>"}]),
                ),
            ):
                got = (await post(served, "/tokenize", {"model": "tiny", **body})).json()
                assert got == {"tokens": ids, "count": len(ids), "max_model_len": 512}
            back = await post(served, "/detokenize", {"tokens": SHIPPED.encode("def é")})
            assert back.json() == {"prompt": "def é"}

    run(go)


def test_metrics_count_what_happened():
    async def go():
        async with serve() as served:
            await post(served, "/v1/completions", {"prompt": PROMPT, "max_tokens": 20})
            await post(served, "/v1/completions", {"prompt": PROMPT, "nonsense": 1})
            await post(served, "/nowhere", {})
            async with httpx.AsyncClient(verify=False) as http:
                text = (await http.get(f"{served.url}/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines['racklab_requests_total{finish="length",model="tiny"}'] == "1.0"
        assert lines['racklab_ttft_seconds_count{model="tiny"}'] == "1.0"
        assert lines['racklab_completion_tokens_total{model="tiny"}'] == "20.0"
        assert lines['racklab_http_responses_total{path="/v1/completions",status="400"}'] == "1.0"
        assert lines['racklab_http_responses_total{path="other",status="404"}'] == "1.0"
        assert float(lines['racklab_engine_steps_total{engine="engine0.0",model="tiny"}']) > 0
        assert lines['racklab_engine_running{engine="engine0.0",model="tiny"}'] == "0.0"
        assert float(lines['racklab_itl_seconds_count{model="tiny"}']) > 0

    run(go)


# --- connections ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_aborts(n, stream):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "n": n, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def go():
        async with serve(engine={"pause_s": 0.02, "most": 1}) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head + body)
            while len(served.engine.running) < n:
                await asyncio.sleep(0.01)
            writer.close()
            await asyncio.wait_for(served.front.idle(), 5)
            assert served.offer.metrics.finishes == {"abort": n}

    run(go)


def test_a_dead_engine_is_an_error_for_all_who_wait():
    async def go():
        async with serve(engine={"pause_s": 0.02, "most": 1}, clean=False) as served:
            body = {"prompt": PROMPT, "max_tokens": 400}
            whole = asyncio.create_task(post(served, "/v1/completions", body))
            stream = asyncio.create_task(post(served, "/v1/completions", body | {"stream": True}))
            while len(served.engine.running) < 2:
                await asyncio.sleep(0.01)
            served.front.fail("the engine process died")
            assert (await whole).status_code == 503 and "died" in (await whole).json()["error"]["message"]
            last = (await stream).text.strip().split("\n\n")[-2:]
            assert (
                json.loads(last[0].removeprefix("data: "))["error"]["type"] == "server_error"
                and last[1] == "data: [DONE]"
            )
            after = await post(served, "/v1/completions", body)
            assert after.status_code == 503 and after.headers["retry-after"]
            async with httpx.AsyncClient(verify=False) as http:
                assert (await http.get(f"{served.url}/health")).status_code == 503

    run(go)


def test_a_full_queue_says_when_to_come_back():
    async def go():
        async with serve(engine={"pause_s": 0.05}) as served:
            body = {"prompt": PROMPT, "max_tokens": 4, "n": 40}
            answers = await asyncio.gather(*(post(served, "/v1/completions", body) for _ in range(4)))
            codes = sorted(a.status_code for a in answers)
            assert codes[0] == 200 and codes[-1] == 429
            full = next(a for a in answers if a.status_code == 429)
            assert full.headers["retry-after"] == "1" and full.json()["error"]["code"] == "queue_full"

    run(go)


def test_the_key():
    async def go():
        async with serve(key="sésame") as served:
            body = {"prompt": PROMPT, "max_tokens": 2}
            for header, status in ((None, 401), ("Bearer sesame", 401), ("sésame", 401), ("Bearer sésame", 200)):
                headers = {} if header is None else {"authorization": header.encode()}
                answer = await post(served, "/v1/completions", body, headers=headers)
                assert answer.status_code == status, header
            assert (await post(served, "/tokenize", {"prompt": "a"})).status_code == 401
            async with httpx.AsyncClient(verify=False) as http:
                assert (await http.get(f"{served.url}/health")).status_code == 200
                assert (await http.get(f"{served.url}/metrics")).status_code == 401
        async with serve(key="k") as served, client(served, "k") as api:
            assert (await api.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)).choices[0].text == "He"

    run(go)
