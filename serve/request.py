"""What a front end asks of an engine and what it gets back: plain values, no torch, no clock.

A front end (HTTP process, trace driver, script) gives each request a ``handle`` that it never uses twice, tokenizes,
hashes and checks it; the engine answers with one `Outputs` a step. n tokens, k alternatives.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from serve.disagg.handoff import Handoff

FINISHES = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class Sampling:
    """How to draw a completion. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep every token.

    ``stop_ids`` end a completion and are not part of it (leave them out to ignore the end of text); none counts before
    ``min_tokens``. ``logprobs`` and ``prompt_logprobs``: how many alternatives beside the chosen token, None for no
    log-probabilities at all. Stop strings are the front end's: it aborts the request.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 <= self.temperature < 1e3:
            raise ValueError(f"temperature must be in [0, 1000), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps every token), got {self.top_k}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens {self.max_tokens}, got {self.min_tokens}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 20:
                raise ValueError(f"{name} must be between 0 and 20, got {value}")


@dataclass(frozen=True, eq=False)
class Ask:
    """A request. ``hashes``: the chained hash of each full page of ``tokens`` (serve/schedule/pages.py), made off the
    engine's thread; empty means that nothing of it is looked up or kept. Lower ``priority`` comes first.

    ``generated``: tokens that another engine generated before; they count as output and are not told again. With
    ``hand_over`` the engine draws one token and lends what is in its cache (`Handed`); with ``handoff`` it fetches what
    another lent. Tokens are a function of request and position, so who computes them makes no difference. Requests of
    one ``session`` are likely to share a prompt: the router keeps them together, engines do not look at it.
    """

    handle: int
    tokens: np.ndarray  # [n] int32 prompt
    hashes: list[bytes]
    sampling: Sampling
    priority: int = 0
    generated: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [g] int32
    hand_over: bool = False
    handoff: Handoff | None = None
    session: str = ""


def prompt_fault(tokens: np.ndarray, context: int, vocab_size: int | None = None) -> str:
    """What is wrong with a prompt, to be read after "the prompt"; empty: nothing. It must leave room for a token."""
    if not len(tokens):
        return "is empty: give at least one token"
    if len(tokens) >= context:
        return f"has {len(tokens)} tokens; the context is {context}, completion included: shorten it"
    low, high = (int(tokens.min()), int(tokens.max())) if vocab_size else (0, 0)
    if low < 0 or high >= (vocab_size or 1):
        return f"holds token id {low if low < 0 else high}; ids are 0 to {vocab_size - 1}"
    return ""


@dataclass(frozen=True)
class Abort:
    """Forget a request; unknown and finished handles are no error."""

    handle: int


@dataclass(frozen=True)
class Pause:
    """``on``: take no step from now on, with all ranks of the group; what runs and what comes keeps its place."""

    on: bool = True


@dataclass(frozen=True)
class Bye:
    """The last message to an engine: leave, with all ranks of its group."""


ToEngine = Ask | Abort | Pause | Bye


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Natural log-probabilities of the model's own distribution (temperature 1, nothing cut off)."""

    chosen: np.ndarray  # [n] fp32 of the tokens that came
    ids: np.ndarray  # [n, k] int32 most probable tokens, best first
    values: np.ndarray  # [n, k] fp32

    def cut(self, begin: int, end: int | None = None) -> "Logprobs":
        """Those of tokens [begin, end)."""
        return Logprobs(self.chosen[begin:end], self.ids[begin:end], self.values[begin:end])


@dataclass(frozen=True)
class Finish:
    """Why a request ended, and what its prompt cost. Sent once for every Ask; ``message`` explains an error, which is
    the request's own fault unless ``unavailable``."""

    handle: int
    reason: str  # one of FINISHES
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    replayed_tokens: int = 0  # of those, recomputed to rebuild windows
    message: str = ""
    unavailable: bool = False  # engines failed: the same request may do well later


@dataclass(frozen=True, eq=False)
class Handed:
    """An Ask with ``hand_over`` is through here, in place of its Finish: whoever gets ``handoff`` goes on with it."""

    handle: int
    handoff: Handoff
    cached_tokens: int = 0
    replayed_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Outputs:
    """New tokens of one step: the first ``counts[0]`` of ``tokens`` belong to ``handles[0]``, and so on."""

    handles: np.ndarray  # [R] int64
    counts: np.ndarray  # [R] int32, >= 1
    tokens: np.ndarray  # [sum counts] int32
    logprobs: dict[int, Logprobs] = field(default_factory=dict)  # handle -> of these tokens
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # handle -> next stretch of the prompt's rows
    finished: list[Finish] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)  # gauges and counters of the engine, for /metrics
    handed: list[Handed] = field(default_factory=list)

    def each(self) -> Iterator[tuple[int, list[int], Logprobs | None]]:
        """(handle, its new tokens, their log-probabilities) of every request that got tokens."""
        at, tokens = 0, self.tokens.tolist()
        for handle, count in zip(self.handles.tolist(), self.counts.tolist(), strict=True):
            yield handle, tokens[at : at + count], self.logprobs.get(handle)
            at += count

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(len(self.handles) or self.finished or self.handed or self.prompt_logprobs)
