"""What `workload:` in the config says, checked: what is played, how fast, for how long. Tokens unless said."""

from collections.abc import Mapping
from dataclasses import dataclass

from serve.load.agenda import Caps
from serve.load.filler import Scale
from serve.load.lanes import LaneSettings
from serve.load.synthetic import BLOCK
from serve.load.traces import MOONCAKE_BLOCK

LOOPS = ("open", "closed")


@dataclass(frozen=True)
class Workload:
    """``limit``: most sessions, rows or prompts that are read, or made where there is no ``path``. A run ends after
    ``duration_s``, after ``max_requests``, or with the trace; what is in flight then has ``drain_s`` to end.

    Those that play a trace have ``block_tokens``, played for each block of it, ``time_scale``, played seconds for each
    recorded one, and ``max_request_tokens``: requests with more, prompt and output as played, are left out.
    """

    kind: str
    limit: int
    seed: int
    duration_s: float | None
    drain_s: float
    max_requests: int | None
    temperature: float
    gpus: int | None  # that throughput and cost are divided by; None: as many as there are ranks
    price_per_hour: float | None  # of one of them

    def __post_init__(self):
        for name in ("limit", "block_tokens"):
            if getattr(self, name, 1) < 1:
                raise ValueError(f"workload.{name} must be >= 1, got {getattr(self, name)}")
        for name in ("max_requests", "max_request_tokens", "gpus"):
            if (value := getattr(self, name, None)) is not None and value < 1:
                raise ValueError(f"workload.{name} must be >= 1 or null, got {value}")
        if self.duration_s is not None and self.duration_s <= 0:
            raise ValueError(f"workload.duration_s must be > 0 or null, got {self.duration_s}")
        for name in ("seed", "drain_s", "time_scale", "temperature", "price_per_hour"):
            if (getattr(self, name, None) or 0) < 0:
                raise ValueError(f"workload.{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class AgentX(Workload):
    """Session trees in lanes (serve/load/lanes.py)."""

    path: str | None
    block_tokens: int
    time_scale: float
    max_request_tokens: int | None
    lanes: int
    system_cap_s: float | None  # idle caps, in played seconds (serve/load/agenda.py)
    tree_cap_s: float | None
    gap_cap_s: float | None
    start: tuple[float, float]
    warmup_requests: int
    subagents: str

    def __post_init__(self):
        super().__post_init__()
        if self.duration_s is None and self.max_requests is None:
            raise ValueError("workload.duration_s and workload.max_requests are both null: lanes would never end")
        for name in ("system_cap_s", "tree_cap_s", "gap_cap_s"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"workload.{name} must be >= 0 or null, got {getattr(self, name)}")
        try:
            self.settings  # noqa: B018  (checks the rest)
        except ValueError as error:
            raise ValueError(f"workload.{error}") from None

    @property
    def scale(self) -> Scale:
        return Scale(BLOCK, self.block_tokens, self.time_scale)

    @property
    def settings(self) -> LaneSettings:
        caps = Caps(self.system_cap_s, self.tree_cap_s, self.gap_cap_s)
        return LaneSettings(
            self.lanes, self.scale, caps, self.seed, self.start, self.warmup_requests, self.subagents
        )  # fmt: skip


@dataclass(frozen=True)
class Looped(Workload):
    """Requests that stand alone. ``loop`` open: at their times; closed: ``concurrency`` at once."""

    loop: str
    concurrency: int

    def __post_init__(self):
        super().__post_init__()
        if self.loop not in LOOPS:
            raise ValueError(f"workload.loop must be one of {', '.join(LOOPS)}, got {self.loop!r}")
        if self.concurrency < 1:
            raise ValueError(f"workload.concurrency must be >= 1, got {self.concurrency}")


@dataclass(frozen=True)
class Trace(Looped):
    """A flat trace: azure, mooncake or tracelab."""

    path: str | None
    block_tokens: int
    time_scale: float
    max_request_tokens: int | None

    @property
    def scale(self) -> Scale:
        return Scale(MOONCAKE_BLOCK if self.kind == "mooncake" else BLOCK, self.block_tokens, self.time_scale)


@dataclass(frozen=True)
class Poisson(Looped):
    """Gamma arrivals (``shape`` 1 is Poisson) at ``rate`` a second, log-normal lengths."""

    block_tokens: int
    time_scale: float
    max_request_tokens: int | None
    rate: float
    shape: float
    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float

    def __post_init__(self):
        super().__post_init__()
        for name in ("rate", "shape", "prompt_median", "output_median"):
            if getattr(self, name) <= 0:
                raise ValueError(f"workload.{name} must be > 0, got {getattr(self, name)}")
        for name in ("prompt_sigma", "output_sigma"):
            if getattr(self, name) < 0:
                raise ValueError(f"workload.{name} must be >= 0, got {getattr(self, name)}")

    @property
    def scale(self) -> Scale:
        return Scale(BLOCK, self.block_tokens, self.time_scale)


@dataclass(frozen=True)
class Prompts(Looped):
    """Prompts of text, one a line of ``path``, or those of ``prompt`` and ``prompt_file``; all at time 0."""

    path: str | None


KINDS = {
    "agentx": AgentX,
    "azure": Trace,
    "mooncake": Trace,
    "tracelab": Trace,
    "poisson": Poisson,
    "prompts": Prompts,
}


def kind(values: Mapping) -> type[Workload]:
    """The class of a ``workload`` group's values. Raises ValueError for a ``kind`` there is not."""
    name = values.get("kind")
    if name not in KINDS:
        raise ValueError(f"workload.kind must be one of {', '.join(KINDS)}, got {name!r}")
    return KINDS[name]
