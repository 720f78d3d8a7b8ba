"""One completion as its tokens come: text decoded, held back where it may begin a stop string, cut at a stop.

Text, ids and log-probabilities are released and trimmed together: what is released is whole tokens whose characters
are complete and belong to no stop string that may still come. k alternatives a token.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from serve.request import Logprobs


class Decoder(Protocol):
    """As `serve.text.StreamDecoder`."""

    def push(self, ids: list[int]) -> str: ...
    def flush(self) -> str: ...
    @property
    def waits(self) -> bool: ...


class NoText:
    """The decoder of a completion that nobody reads."""

    waits = False

    def push(self, ids: list[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class Stops:
    """What ends a completion beside the engine's stop ids. A string counts from the token on that completes it and
    ``min_tokens``; an id of ``ids`` counts after ``min_tokens`` and is part of the completion."""

    strings: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    include: bool = False  # a matched string is part of the text
    min_tokens: int = 0


class Held(NamedTuple):
    """A token not released yet. ``start`` and ``end``: its characters, counted from the completion's first."""

    token: int
    start: int
    end: int
    logprobs: Logprobs | None  # of its step; the token's are in ``row``
    row: int


@dataclass
class Piece:
    """Whole tokens and their text; ``offsets[i]`` is where the text of ``tokens[i]`` begins in the completion."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None

    def __bool__(self):
        return bool(self.text or self.tokens)


class Writer:
    """``limit`` most tokens; later ones are dropped. ``ended`` is set once a stop is found; ``count`` tokens so far."""

    def __init__(self, decoder: Decoder, stops: Stops, limit: int):
        self._decoder, self._stops, self._limit = decoder, stops, limit
        self._pending = ""  # text made, not released
        self._made = 0  # characters made, released or not
        self._held: list[Held] = []
        self.count = 0
        self.ended = False

    def push(self, tokens: list[int], logprobs: Logprobs | None = None) -> Piece:
        """What may be released now that ``tokens`` have come. Tokens after a stop are dropped."""
        for row, token in enumerate(tokens):
            if self.ended or self.count == self._limit:
                break
            start, fresh = self._made, self._decoder.push([token])
            self.count += 1
            self._made += len(fresh)
            self._pending += fresh
            self._held.append(Held(token, start, self._made + self._decoder.waits, logprobs, row))
            cut = self._stop(token, len(fresh))
            if cut is not None:
                self.ended = True
                return self._release(len(self._held), cut)
        return self._release(*self._safe())

    def finish(self) -> Piece:
        """What is left; an unfinished character becomes U+FFFD. Nothing after a stop."""
        if self.ended:
            return Piece()
        self._pending += self._decoder.flush()
        return self._release(len(self._held), len(self._pending))

    def _stop(self, token: int, fresh: int) -> int | None:
        """Where the pending text is cut, if ``token``, which made its last ``fresh`` characters, ends the completion.

        Of several strings the one that is complete first counts, and of those the longest.
        """
        if token in self._stops.ids and self.count > self._stops.min_tokens:
            self._pending += self._decoder.flush()
            return len(self._pending)
        if not fresh or self.count < self._stops.min_tokens:
            return None
        found = []
        for string in self._stops.strings:
            start = self._pending.find(string, max(0, len(self._pending) - fresh - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), start))
        if not found:
            return None
        end, start = min(found)
        return end if self._stops.include else start

    def _safe(self) -> tuple[int, int]:
        """How many held tokens may go, and the length of their text: those that end before a possible stop string."""
        hold = max((_overlap(self._pending, string) for string in self._stops.strings), default=0)
        released, safe, n = self._made - len(self._pending), self._made - hold, 0
        while n < len(self._held) and self._held[n].end <= safe:
            n += 1
        return n, (self._held[n - 1].end - released if n else 0)

    def _release(self, n: int, length: int) -> Piece:
        text, self._pending = self._pending[:length], self._pending[length:]
        out, self._held = self._held[:n], self._held[n:]
        return Piece(text, [h.token for h in out], [h.start for h in out], _rows(out))


def _overlap(text: str, string: str) -> int:
    """The longest end of ``text`` that begins ``string`` and is not the whole of it."""
    for n in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:n]):
            return n
    return 0


def _rows(held: list[Held]) -> Logprobs | None:
    """Log-probabilities of the tokens, None where none were asked for."""
    if not held or held[0].logprobs is None:
        return None
    pick = lambda name: np.stack([getattr(h.logprobs, name)[h.row] for h in held])  # noqa: E731
    return Logprobs(pick("chosen"), pick("ids"), pick("values"))


def join(parts: list[Logprobs]) -> Logprobs | None:
    """One after the other; None for none."""
    if not parts:
        return None
    return Logprobs(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("chosen", "ids", "values")))
