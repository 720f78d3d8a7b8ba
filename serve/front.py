"""The front end of one engine: checks a request, gives it handles and page hashes, and turns outputs into events.

It runs in the HTTP process, or in the engine's own for scripts; it is told the time (``now``, seconds) and has no
threads. One prompt with n completions is n Asks with the seeds seed, seed + 1, ...: the same as n single requests.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from serve.request import Abort, Ask, Finish, Logprobs, Outputs, Sampling, prompt_fault
from serve.schedule.pages import chain
from serve.writer import Decoder, NoText, Piece, Stops, Writer, join

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256


class BadField(ValueError):
    """Bad input; ``field`` names it as the request does."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field} {message}")
        self.field = field


class Busy(Exception):
    """The queue is full: try again later."""


class Closed(Exception):
    """Nothing is taken any more: the server drains, or its engine is gone."""


@dataclass(frozen=True)
class Bounds:
    """What fits the engine, and how much may wait for it."""

    vocab_size: int
    context: int  # tokens of prompt and completion together
    page_size: int  # tokens
    max_waiting: int = 4096  # completions without a first token
    max_prompt_tokens: int = 1 << 26  # of all open requests together


@dataclass(frozen=True)
class Event:
    """News of one completion; the last one has ``finish``. Tokens and text belong together (serve/writer.py)."""

    index: int  # prompt * n + completion
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # where each token's text begins in the completion
    logprobs: Logprobs | None = None  # of these tokens
    prompt_logprobs: Logprobs | None = None  # of the prompt's tokens but the first; with the first event
    finish: str | None = None  # one of serve.request.FINISHES
    cached_tokens: int = 0  # this and the next three: with ``finish``
    replayed_tokens: int = 0
    completion_tokens: int = 0
    message: str = ""  # of an error
    unavailable: bool = False  # the error is not the request's fault


@dataclass(eq=False)
class Part:
    """One Ask on its way."""

    handle: int
    index: int
    prompt: int  # tokens
    writer: Writer
    stream: "Stream"
    came_s: float
    last_s: float | None = None  # when tokens came last
    rows: list[Logprobs] = field(default_factory=list)  # of the prompt, until the first event
    aborted: bool = False
    cut: str = ""  # why the server, and not its client, aborted it


class Stream:
    """The events of a submission, as an async iterator that ends after the last completion's ``finish``."""

    def __init__(self, front: "Front"):
        self._front = front
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.parts: list[Part] = []
        self._left = 0

    def __aiter__(self):
        return self

    async def __anext__(self) -> Event:
        if self._left == 0:
            raise StopAsyncIteration
        event = await self._events.get()
        self._left -= event.finish is not None
        return event

    def abort(self) -> None:
        """End what is unfinished; its last events, with ``finish="abort"``, still come."""
        for part in self.parts:
            self._front.abort(part)

    def close(self) -> None:
        """End what is unfinished and say no more."""
        self.abort()
        self._left = 0

    def _add(self, part: Part) -> None:
        self.parts.append(part)
        self._left += 1


class Front:
    """``decoder()`` makes a completion's decoder (`Text.stream`); without one there is no text. ``metrics``: as
    serve/metrics.py, or None. Call `connect` before anything is submitted."""

    def __init__(
        self,
        bounds: Bounds,
        now: Callable[[], float],
        decoder: Callable[[], Decoder] | None = None,
        metrics=None,
    ):
        self.bounds, self._now, self._decoder, self._metrics = bounds, now, decoder, metrics
        self._send: Callable[[Ask | Abort], None] | None = None
        self._handles = count(1)
        self._open: dict[int, Part] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.waiting = 0  # completions without a first token
        self.prompt_tokens = 0  # of all open completions
        self.stats: dict[str, float] = {}  # the engine's latest
        self.closed: str | None = None  # why nothing is taken any more
        self.failed = False  # the engine is gone

    def connect(self, send: Callable[[Ask | Abort], None]) -> None:
        """``send`` hands a message to the engine, whose outputs come to `deliver`."""
        self._send = send

    @property
    def open(self) -> int:
        """Completions that the engine has not finished."""
        return len(self._open)

    # --- requests ---

    def submit(
        self,
        tokens: np.ndarray,
        sampling: Sampling,
        *,
        stop: Sequence[str] = (),
        kept_stop_ids: Sequence[int] = (),
        include_stop: bool = False,
        n: int = 1,
        priority: int = 0,
        limit: int | None = None,
        hashes: list[bytes] | None = None,
        session: str = "",
    ) -> Stream:
        """n completions of one prompt [t] int32; see `submit_all`."""
        stops = Stops(tuple(stop), tuple(kept_stop_ids), include_stop, sampling.min_tokens)
        names = None if hashes is None else [hashes]
        return self.submit_all([tokens], sampling, stops, n, priority, limit, names, session)

    def submit_all(
        self,
        prompts: Sequence[np.ndarray],
        sampling: Sampling,
        stops: Stops,
        n: int = 1,
        priority: int = 0,
        limit: int | None = None,
        hashes: Sequence[list[bytes]] | None = None,
        session: str = "",
    ) -> Stream:
        """n completions of each prompt, or none at all. ``limit`` cuts completions shorter than ``max_tokens`` (0 is
        allowed); ``hashes`` of the prompts' pages save making them here; ``session``: see `Ask`.

        Raises BadField, Busy or Closed before anything is sent.
        """
        prompts = [np.ascontiguousarray(p) for p in prompts]
        for prompt in prompts:
            self.check(prompt, sampling)
        self._check_stops(stops)
        if n < 1:
            raise BadField("n", f"must be >= 1, got {n}")
        self._admit(len(prompts) * n, n * sum(len(p) for p in prompts))
        stream, now = Stream(self), self._now()
        for i, prompt in enumerate(prompts):
            prompt = prompt.astype(np.int32, copy=False)
            names = chain(prompt, self.bounds.page_size) if hashes is None else hashes[i]
            for j in range(n):
                writer = Writer(self._decoder() if self._decoder else NoText(), stops, self._limit(sampling, limit))
                part = Part(next(self._handles), i * n + j, len(prompt), writer, stream, now)
                self._begin(part)
                seeded = replace(sampling, seed=_seed(sampling.seed + j))
                self._send(Ask(part.handle, prompt, names, seeded, priority, session=session))
        return stream

    def check(self, prompt: np.ndarray, sampling: Sampling) -> None:
        """Raise BadField for a prompt that the engine cannot take."""
        if len(prompt) and (prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer)):
            raise BadField("prompt", f"must be a list of integer token ids, got {prompt.dtype} of {prompt.ndim} axes")
        fault = prompt_fault(prompt, self.bounds.context, self.bounds.vocab_size)
        if fault:
            raise BadField("prompt", fault)
        room = self.bounds.context - len(prompt)
        if sampling.max_tokens > room:
            raise BadField(
                "max_tokens",
                f"is {sampling.max_tokens}, the prompt has {len(prompt)} tokens, and the context is "
                f"{self.bounds.context}: give max_tokens <= {room}",
            )

    def _check_stops(self, stops: Stops) -> None:
        if stops.strings and self._decoder is None:
            raise BadField("stop", "needs text, and this front end has none")
        if len(stops.strings) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_CHARACTERS for s in stops.strings):
            raise BadField("stop", f"takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters")
        if any(not 0 <= i < self.bounds.vocab_size for i in stops.ids):
            raise BadField("stop_token_ids", f"must be 0 to {self.bounds.vocab_size - 1}")

    def _admit(self, asks: int, tokens: int) -> None:
        if self.closed is not None:
            raise Closed(self.closed)
        if asks > self.bounds.max_waiting:
            raise BadField("n", f"makes {asks} completions, more than may wait ({self.bounds.max_waiting})")
        if tokens > self.bounds.max_prompt_tokens:
            raise BadField("prompt", f"holds {tokens} tokens, more than may be open ({self.bounds.max_prompt_tokens})")
        if self.waiting + asks > self.bounds.max_waiting:
            raise Busy(f"{self.waiting} completions wait, {self.bounds.max_waiting} may")
        if self.prompt_tokens + tokens > self.bounds.max_prompt_tokens:
            raise Busy(f"open prompts hold {self.prompt_tokens} tokens, {self.bounds.max_prompt_tokens} may be open")

    @staticmethod
    def _limit(sampling: Sampling, limit: int | None) -> int:
        return sampling.max_tokens if limit is None else min(limit, sampling.max_tokens)

    def _begin(self, part: Part) -> None:
        self._open[part.handle] = part
        part.stream._add(part)
        self._idle.clear()
        self.waiting += 1
        self.prompt_tokens += part.prompt
        if self._metrics:
            self._metrics.began(part.prompt)

    def abort(self, part: Part) -> None:
        """Tell the engine to forget a completion; its Finish will come."""
        if part.handle in self._open and not part.aborted:
            part.aborted = True
            self._send(Abort(part.handle))

    # --- outputs ---

    def deliver(self, out: Outputs) -> None:
        """Hand a step's outputs on; those of unknown handles are dropped."""
        if out.stats:
            self.stats = out.stats
        for handle, rows in out.prompt_logprobs.items():
            if handle in self._open:
                self._open[handle].rows.append(rows)
        for handle, tokens, logprobs in out.each():
            part = self._open.get(handle)
            if part is not None and not part.aborted:
                self._tokens(part, tokens, logprobs)
        for finish in out.finished:
            part = self._open.get(finish.handle)
            if part is not None:
                self._finish(part, finish)

    def _tokens(self, part: Part, tokens: list[int], logprobs: Logprobs | None) -> None:
        now = self._now()
        if part.last_s is None:
            self.waiting -= 1
        if self._metrics:
            since = part.came_s if part.last_s is None else part.last_s
            self._metrics.came(now - since, len(tokens), first=part.last_s is None)
        part.last_s = now
        self._say(part, part.writer.push(tokens, logprobs))
        if part.writer.ended:
            self.abort(part)

    def _say(self, part: Part, piece: Piece, **last) -> None:
        """Queue an event unless it would be empty."""
        if piece or last:
            prompt, part.rows = join(part.rows), []
            part.stream._events.put_nowait(
                Event(part.index, piece.text, piece.tokens, piece.offsets, piece.logprobs, prompt, **last)
            )

    def _finish(self, part: Part, finish: Finish) -> None:
        """The engine is done with the completion: release what was charged for it, and say so."""
        del self._open[part.handle]
        self.waiting -= part.last_s is None
        self.prompt_tokens -= part.prompt
        if not self._open:
            self._idle.set()
        if part.cut and finish.reason == "abort" and not part.writer.count:  # else what came is told, and how it ended
            finish = Finish(part.handle, "error", finish.cached_tokens, finish.replayed_tokens, part.cut, True)
        reason = "stop" if part.writer.ended else finish.reason
        rest = part.writer.finish()
        if self._metrics:
            self._metrics.ended(reason, part.writer.count, finish.cached_tokens, self._now() - part.came_s)
        self._say(
            part,
            rest,
            finish=reason,
            cached_tokens=finish.cached_tokens,
            replayed_tokens=finish.replayed_tokens,
            completion_tokens=part.writer.count,
            message=finish.message,
            unavailable=finish.unavailable,
        )

    # --- the end ---

    def close(self, message: str) -> None:
        """Take nothing more; what was accepted goes on."""
        self.closed = message

    def fail(self, message: str) -> None:
        """The engine is gone: every open completion ends with an error."""
        self.closed, self.failed = message, True
        for part in list(self._open.values()):
            self._finish(part, Finish(part.handle, "error", message=message, unavailable=True))

    def abort_all(self, why: str) -> None:
        """End every open completion, with an error if nothing of it has come: it is the server that wants it."""
        for part in list(self._open.values()):
            part.cut = part.cut or ("" if part.aborted else why)
            self.abort(part)

    async def idle(self) -> None:
        """Return once nothing is open."""
        await self._idle.wait()


def _seed(value: int) -> int:
    """``value`` wrapped to 64 bits, signed."""
    return (value + 2**63) % 2**64 - 2**63
