"""Sizes of one engine's scheduler and cache."""

from dataclasses import dataclass

from serve.windows import PREFILLS


@dataclass(frozen=True)
class Limits:
    """Sizes of one engine, in tokens unless said. ``drafts``: most tokens a sequence verifies in a step."""

    page_size: int
    pages: int  # without the scratch page
    max_batch: int  # sequences that run together
    context: int  # most tokens of one sequence
    budget_tokens: int = 512  # rows of a step
    long_prefill_tokens: int = 512  # most prompt tokens of one sequence in a step
    max_waiting: int = 4096  # requests in line
    max_wait_steps: int = 2000  # after which a request goes before all others
    drafts: int = 0
    prefill: str = "full"
    retained: int = 0  # stored window rings, of window=retain

    def __post_init__(self):
        for name in ("page_size", "pages", "max_batch", "context", "long_prefill_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"serve.{name} must be >= 1, got {getattr(self, name)}")
        if self.budget_tokens <= self.max_batch:
            raise ValueError(
                f"serve.budget_tokens must exceed serve.max_batch {self.max_batch}, so that prompts go on beside a "
                f"full batch; got {self.budget_tokens}"
            )
        if self.max_wait_steps < 1 or self.drafts < 0:
            raise ValueError(f"serve.max_wait_steps must be >= 1 and drafts >= 0: {self.max_wait_steps}, {self.drafts}")
        if self.prefill not in PREFILLS:
            raise ValueError(f"serve.prefill must be one of {', '.join(PREFILLS)}, got {self.prefill!r}")
