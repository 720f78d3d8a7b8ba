"""Events as OpenAI objects: completions and chat, whole and as chunks, with log-probabilities and usage."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.api.asked import Asked
from serve.front import Event
from serve.request import Logprobs

LEAST = -9999.0  # what JSON gets for minus infinity
FINISHES = {"stop": "stop", "length": "length"}  # others go by their own name


@dataclass
class Usage:
    """``prompt`` counts each prompt once, ``completion`` every choice. Cached tokens are those of a prompt's first."""

    prompt: int
    n: int  # completions a prompt
    completion: int = 0
    cached: int = 0
    replayed: int = 0  # of the cached, recomputed to rebuild windows

    def add(self, last: Event) -> None:
        self.completion += last.completion_tokens
        if last.index % self.n == 0:
            self.cached += last.cached_tokens
            self.replayed += last.replayed_tokens

    def body(self) -> dict:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "replayed_tokens": self.replayed},
        }


@dataclass
class Answer:
    """The objects of one response. ``text`` is the tokenizer, ``head`` has id, created and model."""

    asked: Asked
    text: Any
    head: dict
    begun: list[bool] = field(default_factory=list)  # by choice: its first event has been seen

    def __post_init__(self):
        self.begun = [False] * (len(self.asked.prompts) * self.asked.n)
        self.usage = Usage(sum(map(len, self.asked.prompts)), self.asked.n)

    # --- a stream ---

    def first(self) -> list[dict]:
        """Chunks before any event: a chat's choices each say who speaks."""
        if not self.asked.chat:
            return []
        role = {"role": "assistant", "content": ""}
        return [self.chunk([_chat_choice("delta", i, role, None, None)]) for i in range(self.asked.n)]

    def news(self, event: Event) -> dict:
        """The chunk of an event."""
        text, logprobs = self.read(event)
        finish = FINISHES.get(event.finish, event.finish)
        if self.asked.chat:
            delta = {"content": text} if text else {}
            choice = _chat_choice("delta", event.index, delta, _content(logprobs), finish)
        else:
            choice = _choice(event.index, text, _legacy([logprobs]), finish)
        return self.chunk([choice | self.ids(event.tokens)])

    def last(self) -> list[dict]:
        return [self.chunk([], self.usage.body())] if self.asked.usage else []

    def chunk(self, choices: list[dict], usage: dict | None = None) -> dict:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        chunk = {**self.head, "object": kind, "choices": choices}
        return chunk | {"usage": usage} if self.asked.usage else chunk

    # --- a whole ---

    def whole(self, events: Iterable[Event]) -> dict:
        """The response of all events."""
        texts: list[list[str]] = [[] for _ in self.begun]
        logprobs: list[list[Rows | None]] = [[] for _ in self.begun]
        tokens: list[list[int]] = [[] for _ in self.begun]
        finishes: list[str | None] = [None] * len(self.begun)
        for event in events:
            text, rows = self.read(event)
            texts[event.index].append(text)
            logprobs[event.index].append(rows)
            tokens[event.index] += event.tokens
            finishes[event.index] = event.finish or finishes[event.index]
        choices = []
        for i, finish in enumerate(finishes):
            text, finish = "".join(texts[i]), FINISHES.get(finish, finish)
            if self.asked.chat:
                message = {"role": "assistant", "content": text, "refusal": None}
                choice = _chat_choice("message", i, message, _content(*logprobs[i]), finish)
            else:
                choice = _choice(i, text, _legacy(logprobs[i]), finish)
            choices.append(choice | self.ids(tokens[i]))
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage.body()}

    # --- an event ---

    def ids(self, tokens: list[int]) -> dict:
        """What a choice says of its tokens' ids; a prompt's are not among them."""
        return {"token_ids": tokens} if self.asked.token_ids else {}

    def read(self, event: Event) -> tuple[str, "Rows | None"]:
        """The text and log-probabilities an event adds, an echoed prompt's in front; counts usage."""
        if event.finish:
            self.usage.add(event)
        echoed, text, base, rows = "", event.text, 0, None
        if self.asked.echo:
            echoed = self.prompt_text(event.index // self.asked.n)
            base = len(echoed)
        if self.asked.alternatives is not None:
            rows = Rows([], [], [], [])
        if not self.begun[event.index]:
            self.begun[event.index] = True
            text = echoed + text
            if rows is not None and self.asked.echo:
                self.prompt_rows(rows, event)
        if rows is not None and event.logprobs is not None:
            rows.add(self.text, event.tokens, [base + o for o in event.offsets], event.logprobs)
        return text, rows

    def prompt_text(self, prompt: int) -> str:
        written = self.asked.texts[prompt]
        return self.text.decode(self.asked.prompts[prompt].tolist()) if written is None else written

    def prompt_rows(self, rows: "Rows", event: Event) -> None:
        """The prompt's tokens; nothing predicted the first."""
        prompt = event.index // self.asked.n
        tokens = self.asked.prompts[prompt].tolist()
        decoder, offsets, at = self.text.stream(), [], 0
        for i, token in enumerate(tokens):
            offsets.append(at)
            made = len(decoder.push([token]))
            added = i == 0 and self.asked.texts[prompt] is not None  # the beginning of text, which nobody wrote
            at += 0 if added else made
        rows.tokens.append(self.text.piece(tokens[0]))
        rows.offsets.append(offsets[0])
        rows.chosen.append(None)
        rows.top.append(None)
        if event.prompt_logprobs is not None:
            rows.add(self.text, tokens[1:], offsets[1:], event.prompt_logprobs)


@dataclass
class Rows:
    """Tokens with their log-probabilities, as JSON wants them. ``top[i]``: the alternatives of token i, best first."""

    tokens: list[bytes]
    offsets: list[int]
    chosen: list[float | None]
    top: list[list[tuple[bytes, float]] | None]

    def add(self, text: Any, tokens: Sequence[int], offsets: Sequence[int], logprobs: Logprobs) -> None:
        self.tokens += [text.piece(t) for t in tokens]
        self.offsets += offsets
        self.chosen += [_finite(v) for v in logprobs.chosen.tolist()]
        for ids, values in zip(logprobs.ids.tolist(), logprobs.values.tolist(), strict=True):
            self.top.append([(text.piece(i), _finite(v)) for i, v in zip(ids, values, strict=True)])


def _choice(index: int, text: str, logprobs: dict | None, finish: str | None) -> dict:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _chat_choice(part: str, index: int, said: dict, logprobs: dict | None, finish: str | None) -> dict:
    return {"index": index, part: said, "logprobs": logprobs, "finish_reason": finish}


def _legacy(parts: Sequence[Rows | None]) -> dict | None:
    """The completions format. A token that is no whole character is spelled ``bytes:\\xNN``; the chosen token is always
    among its alternatives."""
    if not parts or parts[0] is None:
        return None
    tokens, offsets, chosen, top = [], [], [], []
    for rows in parts:
        names = [_name(t) for t in rows.tokens]
        tokens += names
        offsets += rows.offsets
        chosen += rows.chosen
        for name, value, others in zip(names, rows.chosen, rows.top, strict=True):
            best: dict[str, float] | None = None if others is None else {}
            for piece, v in others or ():
                best.setdefault(_name(piece), v)
            if best is not None:
                best.setdefault(name, value)
            top.append(best)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def _content(*parts: Rows | None) -> dict | None:
    """The chat format."""
    if not parts or parts[0] is None:
        return None
    content = []
    for rows in parts:
        for piece, value, top in zip(rows.tokens, rows.chosen, rows.top, strict=True):
            content.append(_token(piece, value) | {"top_logprobs": [_token(p, v) for p, v in top]})
    return {"content": content, "refusal": None}


def _token(piece: bytes, value: float) -> dict:
    return {"token": piece.decode("utf-8", "replace"), "logprob": value, "bytes": list(piece)}


def _name(piece: bytes) -> str:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in piece)


def _finite(value: float) -> float:
    return max(value, LEAST)


def sse(body: dict | str) -> bytes:
    """A server-sent event. JSON is ASCII: U+2028 and U+2029 would end a line for some readers."""
    return f"data: {body if isinstance(body, str) else dump(body)}\n\n".encode()


def dump(body: dict) -> str:
    return json.dumps(body, allow_nan=False, separators=(",", ":"))
