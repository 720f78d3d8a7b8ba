"""What a completion or chat body asks for, checked: prompts as token ids, sampling, stops, form."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.api.body import ApiError, Body
from serve.front import Bounds
from serve.request import Sampling
from serve.writer import Stops

MAX_N = 128
MAX_ALTERNATIVES = 20
MAX_PROMPTS = 2048
INT64 = 2**63
HARMLESS = (  # what clients send and nothing here depends on
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """``texts[i]`` is what the client wrote for ``prompts[i]``, None where it sent ids. ``alternatives``: None for no
    log-probabilities. ``limit`` cuts completions below ``sampling.max_tokens``."""

    prompts: list[np.ndarray]
    texts: list[str | None]
    sampling: Sampling
    stops: Stops
    n: int
    limit: int | None
    priority: int
    stream: bool
    usage: bool  # in a last chunk of the stream
    token_ids: bool  # with each chunk and choice: the ids of its tokens, whose text it holds
    echo: bool
    alternatives: int | None
    chat: bool
    max_field: str  # the name under which the client gave a limit


def completion(body: Body, text: Any, bounds: Bounds, seed: int) -> Asked:
    """A /v1/completions body. ``seed`` is taken where it names none. Raises ApiError."""
    prompts, texts = _prompts(body, text, bounds.context)
    echo = body.flag("echo")
    alternatives = body.integer("logprobs", 0, MAX_ALTERNATIVES, None)
    body.only("best_of", 1)
    body.only("suffix", "")
    max_tokens = body.integer("max_tokens", 0, bounds.context, None)
    default = max(1, min(16, bounds.context - max(len(p) for p in prompts)))
    max_tokens = default if max_tokens is None else max_tokens
    if max_tokens == 0 and not echo:
        raise ApiError(400, "max_tokens must be >= 1 unless echo is true, got 0", "max_tokens")
    return _asked(body, text, prompts, texts, seed, max_tokens, "max_tokens", echo, alternatives, False)


def chat(body: Body, text: Any, bounds: Bounds, seed: int, default_tokens: int) -> Asked:
    """A /v1/chat/completions body; ``default_tokens`` are completed where it names no limit. Raises ApiError."""
    prompt = messages(body, text, bounds.context)
    for name, allowed in (("tools", [[]]), ("functions", [[]]), ("tool_choice", ["none", "auto"]),
                          ("response_format", [{"type": "text"}]), ("modalities", [["text"]]),
                          ("function_call", ["none", "auto"]), ("parallel_tool_calls", [True, False])):  # fmt: skip
        body.only(name, *allowed)
    alternatives = body.integer("top_logprobs", 0, MAX_ALTERNATIVES, None)
    if body.flag("logprobs"):
        alternatives = alternatives or 0
    elif alternatives is not None:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    name = "max_completion_tokens"
    limits = {key: body.integer(key, 1, bounds.context, None) for key in ("max_tokens", name)}
    name = name if limits[name] is not None or limits["max_tokens"] is None else "max_tokens"
    room = max(1, min(default_tokens, bounds.context - len(prompt)))
    max_tokens = room if limits[name] is None else limits[name]
    return _asked(body, text, [prompt], [None], seed, max_tokens, name, False, alternatives, True)


def _asked(
    body: Body,
    text: Any,
    prompts: list[np.ndarray],
    texts: list[str | None],
    seed: int,
    max_tokens: int,
    max_name: str,
    echo: bool,
    alternatives: int | None,
    chat: bool,
) -> Asked:
    """What both kinds of body share."""
    stream = body.flag("stream")
    options = body.inside("stream_options")
    usage = options.flag("include_usage")
    options.ignore("include_obfuscation")
    options.done()
    token_ids = body.flag("return_token_ids")
    # Clients that score a prompt ask for one token more and drop it: it must come, even if it is the end of text.
    scored = echo and alternatives is not None and max_tokens > 0
    low = body.integer("min_tokens", 0, max(1, max_tokens), 0)
    own = tuple(body.integers("stop_token_ids"))
    include = body.flag("include_stop_str_in_output")
    kept = own if include else ()
    ended = () if body.flag("ignore_eos") else (text.eos_id,)
    if any(not 0 <= i < text.vocab_size for i in own):
        raise ApiError(400, f"stop_token_ids must be 0 to {text.vocab_size - 1}", "stop_token_ids")
    stops = Stops(tuple(body.texts("stop")), kept, include, low)
    top_k = body.integer("top_k", -1, 2**31 - 1, 0)
    top_p = body.number("top_p", 0, 1, 1.0)
    if top_p == 0:
        raise ApiError(400, "top_p must be above 0", "top_p")
    sampling = Sampling(
        max_tokens=max(1, max_tokens),
        temperature=body.number("temperature", 0, 100, 1.0),
        seed=body.integer("seed", -INT64, INT64 - 1, seed),
        stop_ids=tuple(i for i in dict.fromkeys((*ended, *own)) if i not in kept),
        top_p=top_p,
        top_k=max(0, top_k),
        min_tokens=min(max(low, int(scored)), max(1, max_tokens)),
        logprobs=alternatives,
        prompt_logprobs=alternatives if echo else None,
    )
    n = body.integer("n", 1, MAX_N, 1)
    priority = body.integer("priority", -(2**31), 2**31 - 1, 0)
    for name, nothing in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
        body.only(name, nothing)
    body.only("logit_bias", {})
    body.only("min_p", 0)
    body.ignore(*HARMLESS)
    body.done()
    limit = 0 if max_tokens == 0 else None
    form = stream, usage, token_ids, echo, alternatives, chat, max_name
    return Asked(prompts, texts, sampling, stops, n, limit, priority, *form)


# --- prompts ---


def _prompts(body: Body, text: Any, context: int) -> tuple[list[np.ndarray], list[str | None]]:
    """``prompt`` in its four forms: text, texts, ids, lists of ids."""
    value = body.take("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        body.bad("prompt", "must be a string, a list of strings, a list of token ids or a list of such lists")
    if len(value) > MAX_PROMPTS:
        body.bad("prompt", f"holds {len(value)} prompts; {MAX_PROMPTS} may be sent at once")
    if all(type(v) is str for v in value):
        value = [short(body, "prompt", v, text, context) for v in value]
        return [ids(text.prompt(v)) for v in value], value
    if not all(isinstance(v, list) for v in value):
        body.bad("prompt", "must hold strings only, or token ids only")
    return [_ids(body, "prompt", v, text.vocab_size) for v in value], [None] * len(value)


def _ids(body: Body, name: str, value: list, vocab_size: int) -> np.ndarray:
    for i in value:
        if type(i) is not int or not 0 <= i < vocab_size:
            body.bad(name, f"holds {str(i)[:40]}, which is no token id from 0 to {vocab_size - 1}")
    if not value:
        body.bad(name, "is empty: give at least one token")
    return ids(value)


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def tokens(body: Body, text: Any) -> np.ndarray:
    """The ``tokens`` of a /detokenize body."""
    value = body.take("tokens")
    if not isinstance(value, list):
        body.bad("tokens", "must be a list of token ids")
    return _ids(body, "tokens", value, text.vocab_size) if value else ids([])


def short(body: Body, name: str, value: str, text: Any, context: int) -> str:
    """``value``, unless it has more tokens than the context for certain: to find out how many would take long."""
    value = body.characters(name, value)
    size = len(value.encode())
    if size > context * text.longest:
        body.bad(name, f"has {size} bytes, {size // text.longest} tokens or more; the context is {context}: shorten it")
    return value


def messages(body: Body, text: Any, context: int) -> np.ndarray:
    """The prompt of ``messages``, by the chat template."""
    value = body.take("messages")
    if not isinstance(value, list) or not value:
        body.bad("messages", "must be a list of at least one message")
    try:
        said = [_message(body, i, m) for i, m in enumerate(value)]
        short(body, "messages", "".join(m["content"] for m in said), text, context)
        return ids(text.chat(said))
    except ValueError as error:
        raise ApiError(400, str(error), "messages") from None


def _message(body: Body, i: int, value: Any) -> dict:
    where = f"messages[{i}]"
    if not isinstance(value, dict):
        body.bad(where, "must be an object with role and content")
    one = Body(value, f"{where}.")
    role = one.text("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant"):
        one.bad("role", "must be system, developer, user or assistant")
    content = one.take("content")
    if isinstance(content, list):
        content = "".join(_part(one, j, part) for j, part in enumerate(content))
    if not isinstance(content, str):
        one.bad("content", "must be a string or a list of text parts")
    one.ignore("name", "refusal")
    one.only("tool_calls", [])
    one.ignore("reasoning_content")
    one.done()
    return {"role": role, "content": one.characters("content", content)}


def _part(body: Body, j: int, value: Any) -> str:
    if not isinstance(value, dict) or value.get("type") != "text" or not isinstance(value.get("text"), str):
        body.bad(f"content[{j}]", 'must be {"type": "text", "text": "..."}: this model reads text alone')
    return value["text"]
