"""A request on its way through the router, and its tries at engines."""

from dataclasses import dataclass, field

import numpy as np

from serve.request import Ask, Handed, Logprobs
from serve.router.fleet import Member


@dataclass(eq=False)
class Try:
    """A request at an engine. ``tokens`` and ``prompt`` are charged to it (`Member`); ``rows``: of the prompt's
    log-probabilities, how many it told."""

    handle: int
    course: "Course"
    engine: Member
    tokens: int
    prompt: int
    rows: int = 0

    def charge(self) -> None:
        self.engine.requests += 1
        self.engine.tokens += self.tokens
        self.engine.prompt += self.prompt
        self.engine.sent += 1

    def computed(self) -> None:
        """Its prompt is done."""
        self.engine.prompt -= self.prompt
        self.prompt = 0

    def discharge(self) -> None:
        """The engine has nothing of it open any more."""
        self.computed()
        self.engine.requests -= 1
        self.engine.tokens -= self.tokens

    def fresh(self, rows: Logprobs) -> Logprobs | None:
        """Of the next rows of a prompt, those that the front end does not have from an earlier try."""
        known = max(0, self.course.rows - self.rows)
        self.rows += len(rows.chosen)
        self.course.rows = max(self.course.rows, self.rows)
        return rows.cut(known) if known < len(rows.chosen) else None


@dataclass(eq=False)
class Course:
    """A request on its way. It waits for an engine while ``at`` is None; ``lender`` holds what ``at`` was lent."""

    ask: Ask
    told: list[int] = field(default_factory=list)  # tokens that the front end has
    rows: int = 0  # of the prompt's log-probabilities, how many it has
    at: Try | None = None
    lender: Try | None = None
    handed: Handed | None = None
    retries: int = 0
    since: float = 0.0  # when it began to wait
    aborted: bool = False

    @property
    def generated(self) -> np.ndarray:
        return np.concatenate([self.ask.generated, np.array(self.told, np.int32)])
