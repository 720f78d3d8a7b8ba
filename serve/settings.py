"""What `serve:` in the config says, checked: sizes, rules and switches of one engine. Tokens unless said."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve.disagg.handoff import Rules
from serve.schedule.windows import PREFILLS, WINDOWS


@dataclass(frozen=True)
class Policy:
    """The file serve/schedule/policies/``name``.py; ``rekey``: its keys change while a request waits."""

    name: str
    rekey: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Speculation:
    """Drafts in the loop, where ``speculate`` is on.

    ``block``: most drafts a sequence verifies in a step, None for the drafter's own. ``adaptive``: fewer where they are
    unlikely to pay, by the drafter's confidence and what a verified row costs, ``row_cost`` of a step's fixed cost.
    ``force_acceptance``: accept so many tokens a step on average, right or wrong (benchmarks with filler text).
    """

    block: int | None = None
    adaptive: bool = False
    row_cost: float = 0.02
    force_acceptance: float | None = None

    def __post_init__(self):
        if self.block is not None and self.block < 1:
            raise ValueError(f"serve.speculation.block must be >= 1, got {self.block}; speculate=false drafts nothing")
        if self.row_cost < 0:
            raise ValueError(f"serve.speculation.row_cost must be >= 0, got {self.row_cost}")
        if self.force_acceptance is not None and self.force_acceptance < 1:
            raise ValueError(
                f"serve.speculation.force_acceptance counts tokens a step, so it is >= 1, got {self.force_acceptance}"
            )


@dataclass(frozen=True)
class Capture:
    """``buckets``: rows of decode steps that are recorded as graphs of the GPU and replayed (serve/capture.py); a step
    is padded to the least that holds it. None: no step is."""

    buckets: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.buckets is not None and (not self.buckets or min(self.buckets) < 1):
            raise ValueError(f"serve.capture.buckets must be numbers of rows >= 1, or null, got {list(self.buckets)}")


@dataclass(frozen=True)
class Serve:
    page_size: int
    pages: int  # without the scratch page
    max_batch: int  # sequences that run together
    budget_tokens: int = 512  # rows of a step
    long_prefill_tokens: int = 512  # most prompt tokens of one sequence in a step
    max_waiting: int = 4096  # requests in line
    max_wait_steps: int = 2000  # after which a request goes before all others
    window: str = "replay"  # what a prefix hit does: serve/schedule/windows.py
    prefill: str = "full"  # which rows the late layers run on
    retained: int = 32  # stored window rings, of window=retain
    overlap: int = 0  # 1: plan a step while the one before runs
    rehearse: bool = True  # a step of each size before the first request: serve/rehearse.py
    policy: Policy = Policy("fcfs")
    speculation: Speculation = Speculation()
    capture: Capture = Capture()
    handoff: Rules | None = None  # how requests go to and come from other engines; None: they do not

    def __post_init__(self):
        for name in ("page_size", "pages", "max_batch", "long_prefill_tokens", "max_waiting", "max_wait_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"serve.{name} must be >= 1, got {getattr(self, name)}")
        if self.budget_tokens <= self.max_batch:
            raise ValueError(
                f"serve.budget_tokens must exceed serve.max_batch {self.max_batch}, so that prompts go on beside a "
                f"full batch; got {self.budget_tokens}"
            )
        for name, known in (("window", WINDOWS), ("prefill", PREFILLS), ("overlap", (0, 1))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"serve.{name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}"
                )
        if self.window == "retain" and self.prefill != "full":
            raise ValueError(f"serve.window=retain stores whole rings: it needs serve.prefill=full, got {self.prefill}")
        if self.window == "retain" and self.retained < 1:
            raise ValueError(f"serve.window=retain needs serve.retained >= 1, got {self.retained}")

    @property
    def slots(self) -> int:
        """Slots of the cache without the scratch slot: of running sequences, then of stored windows."""
        return self.max_batch + (self.retained if self.window == "retain" else 0)


@dataclass(frozen=True)
class Limits:
    """What the scheduler needs to know of `Serve`, the model and the cache. ``drafts`` 0: no speculation."""

    serve: Serve
    context: int  # most tokens of one sequence
    window: int
    layers: int
    drafts: int = 0
