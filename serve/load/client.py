"""What sends a load's requests: over HTTP to any OpenAI-compatible server, or to an engine of the same process.

A client tells when each stretch of tokens came and, at the end, what the request cost. n prompt tokens.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import httpx
import numpy as np

from serve.clock import Clock
from serve.mailbox import Mailbox
from serve.request import Abort, Ask, Outputs, Sampling
from serve.schedule.pages import chain

Arrived = Callable[[float, int], None]  # (time by the clock, tokens that came together)


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """One completion to ask for. It ends by length alone. ``session`` and ``turn`` say where it comes from."""

    tokens: np.ndarray  # [n] int32
    max_tokens: int
    affinity: str = ""  # requests that share prompts have it in common
    session: str = ""
    turn: int = 0
    lane: int = 0
    warmup: bool = False  # played, not counted
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Usage:
    """What a request came to. ``finish`` is one of serve.request.FINISHES; ``message`` explains an error."""

    finish: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache
    replayed_tokens: int = 0  # of those, recomputed to rebuild windows
    message: str = ""


class Client(Protocol):
    async def complete(self, request: LoadRequest, arrived: Arrived) -> Usage:
        """Play one request. Failures are a Usage with ``finish="error"``; cancelling aborts the request."""
        ...


# --- in process ---


@dataclass(frozen=True)
class StepSeen:
    """An engine's step as its outputs show it."""

    at_s: float
    requests: int
    tokens: int
    stats: dict[str, float]


@dataclass(eq=False)
class Waiting:
    arrived: Arrived
    done: asyncio.Future
    prompt: int
    output: int = 0


@dataclass(eq=False)
class LocalClient:
    """Speaks through ``mailbox`` with an engine of this event loop, or with what stands for it; ``steps`` keeps what
    each step told."""

    clock: Clock
    page_size: int
    mailbox: Mailbox = field(init=False)  # or whatever else has its `send`
    steps: list[StepSeen] = field(default_factory=list)

    def __post_init__(self):
        self.mailbox = Mailbox(self.deliver)
        self._handles = itertools.count(1)
        self._waiting: dict[int, Waiting] = {}

    async def complete(self, request: LoadRequest, arrived: Arrived) -> Usage:
        handle = next(self._handles)
        mine = Waiting(arrived, asyncio.get_running_loop().create_future(), len(request.tokens))
        sampling = Sampling(request.max_tokens, request.temperature, request.seed)
        hashes = chain(request.tokens, self.page_size)
        self._waiting[handle] = mine
        self.mailbox.send(Ask(handle, request.tokens, hashes, sampling))
        try:
            return await mine.done
        except asyncio.CancelledError:
            self.mailbox.send(Abort(handle))
            raise
        finally:
            del self._waiting[handle]

    def deliver(self, outputs: Outputs) -> None:
        """Called with each step's outputs."""
        now = self.clock.now()
        for handle, tokens, _ in outputs.each():
            mine = self._waiting.get(handle)
            if mine is not None:
                mine.output += len(tokens)
                mine.arrived(now, len(tokens))
        for end in outputs.finished:
            mine = self._waiting.get(end.handle)
            if mine is not None and not mine.done.done():
                usage = Usage(end.reason, mine.prompt, mine.output, end.cached_tokens, end.replayed_tokens, end.message)
                mine.done.set_result(usage)
        self.steps.append(StepSeen(now, len(outputs.handles), len(outputs.tokens), outputs.stats))


# --- over HTTP ---


class HttpClient:
    """Streams /v1/completions with the prompt as token ids. Use as ``async with HttpClient(...) as client``."""

    def __init__(
        self, url: str, clock: Clock, key: str | None = None, model: str | None = None, timeout_s: float = 600
    ):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.url, self.clock, self.model = url.rstrip("/"), clock, model
        self._extra = {"return_token_ids": True}  # until a server refuses it; others leave it out of account
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits, trust_env=False)

    async def __aenter__(self) -> "HttpClient":
        """Raises ValueError if there is no server, or it names no model."""
        if self.model is None:
            try:
                answer = await self._http.get(f"{self.url}/v1/models")
                self.model = answer.raise_for_status().json()["data"][0]["id"]
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
                await self._http.aclose()
                raise ValueError(f"target={self.url}: {self.url}/v1/models does not answer: {error!r}") from None
        return self

    async def __aexit__(self, *_) -> None:
        await self._http.aclose()

    async def complete(self, request: LoadRequest, arrived: Arrived) -> Usage:
        try:
            with_headers = {"x-session-affinity": request.affinity} if request.affinity else {}
            body = self.body(request)
            call = self._http.stream("POST", f"{self.url}/v1/completions", json=body, headers=with_headers)
            async with call as answer:
                if answer.status_code != 200:
                    said = (await answer.aread()).decode("utf-8", "replace")
                    if "return_token_ids" in body and answer.status_code in (400, 422) and "return_token_ids" in said:
                        self._extra = {}
                        return await self.complete(request, arrived)
                    return Usage("error", len(request.tokens), message=f"{answer.status_code}: {said[:500]}")
                return await self.read(answer.aiter_lines(), arrived)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return Usage("error", len(request.tokens), message=repr(error))

    def body(self, request: LoadRequest) -> dict:
        return {
            "model": self.model,
            "prompt": request.tokens.tolist(),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }

    async def read(self, lines: AsyncIterator[str], arrived: Arrived) -> Usage:
        """Follow the server-sent events. A chunk counts as many tokens as its ``token_ids``; without them as one, even
        if its bytes are no characters yet."""
        finish, usage = "", None
        async for line in lines:
            if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                return Usage("error", message=str(chunk["error"])[:500])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                ends = choice.get("finish_reason")
                finish = ends or finish
                ids = choice.get("token_ids")
                tokens = int(bool(choice.get("text")) or not ends) if ids is None else len(ids)
                if tokens:
                    arrived(self.clock.now(), tokens)
        if usage is None or not finish:
            return Usage("error", message="the stream ended without a finish_reason and usage")
        details = usage.get("prompt_tokens_details") or {}
        cached, replayed = details.get("cached_tokens") or 0, details.get("replayed_tokens") or 0
        return Usage(finish, usage["prompt_tokens"], usage["completion_tokens"], cached, replayed)
