"""Sizes of the evaluations: what `evaluate`, `needle`, `agreement` and `routing` in conf/config.yaml mean."""

from dataclasses import dataclass

from scripts.mapping import at_least


@dataclass(frozen=True)
class Evaluate:
    """Sizes of `eval=loss` and `eval=acceptance`, in tokens and prompts; ``batch`` holds for all evaluations."""

    context: int
    stride: int
    batch: int
    prompts: int
    prompt_tokens: int
    temperature: float
    bytes: int | None

    def __post_init__(self):
        at_least(1, self, ("context", "stride", "batch", "prompts", "prompt_tokens"), "evaluate.")
        if self.bytes is not None and self.bytes < 1:
            raise ValueError(f"evaluate.bytes must be >= 1 or null, got {self.bytes}")
        if self.stride > self.context:
            raise ValueError(f"evaluate.stride must be <= evaluate.context {self.context}, got {self.stride}")


@dataclass(frozen=True)
class Needle:
    """``samples`` prompts of each of ``lengths`` tokens, the needle at each of ``depths`` (0: first line, 1: last)."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    letters: int  # of the random name and of the random value

    def __post_init__(self):
        at_least(1, self, ("samples", "letters"), "needle.")
        if not self.lengths or not self.depths:
            raise ValueError("needle.lengths and needle.depths must not be empty")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"needle.depths must lie in 0..1, got {depth}")


@dataclass(frozen=True)
class Agreement:
    """Configs to hold ``against`` this run's own, on ``samples`` prompts of ``prompt`` tokens and the ``tail`` tokens
    after each; a cached prefix ends at ``hit``."""

    against: tuple[str, ...]
    samples: int
    prompt: int
    tail: int
    hit: int

    def __post_init__(self):
        at_least(1, self, ("samples", "prompt", "tail", "hit"), "agreement.")
        if not self.against:
            raise ValueError("agreement.against is empty: name at least one")
        if self.hit >= self.prompt:
            raise ValueError(f"agreement.hit must be < agreement.prompt {self.prompt}, got {self.hit}")


@dataclass(frozen=True)
class Routing:
    """A trace over ``prompts`` of ``prompt_tokens`` tokens, each then decoded for ``max_tokens`` tokens; balancedness
    for each of ``ranks``."""

    prompts: int
    prompt_tokens: int
    max_tokens: int
    ranks: tuple[int, ...]

    def __post_init__(self):
        at_least(1, self, ("prompts", "prompt_tokens", "max_tokens"), "routing.")
        for ranks in self.ranks:
            if ranks < 1:
                raise ValueError(f"routing.ranks must be >= 1, got {ranks}")
