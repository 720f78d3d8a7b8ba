"""Runs an engine on a mailbox until all requests are answered, checking its books after every step."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from model.transformer import Model
from scripts.serving.engine import engine_on, runner_of
from serve.mailbox import Mailbox
from serve.request import Abort, Ask, Finish, Logprobs, Outputs, Sampling
from serve.schedule.pages import chain
from serve.settings import Serve, Speculation

SERVE = Serve(page_size=64, pages=64, max_batch=8, budget_tokens=64, window="none")


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


class Bench:
    """One engine; ``serve`` fields and ``block`` as keywords."""

    def __init__(
        self, model: Model, speculate: bool = False, block: int | None = None, device: str = "cpu", **serve
    ):  # fmt: skip
        speculation = Speculation(block=block, **serve.pop("speculation", {}))
        self.answers: dict[int, Answer] = {}
        self.mail = Mailbox(self.deliver)
        self.serve = replace(SERVE, speculation=speculation, **serve)
        self.engine = engine_on(runner_of(model, self.serve, device), self.serve, speculate, self.mail)
        self.handles = 0

    def ask(self, tokens: np.ndarray, sampling: Sampling, **more) -> int:
        self.handles += 1
        tokens = np.asarray(tokens, np.int32)
        hashes = chain(tokens, self.serve.page_size)
        self.mail.send(Ask(self.handles, tokens, hashes, sampling, **more))
        self.answers[self.handles] = Answer()
        return self.handles

    def abort(self, handle: int) -> None:
        self.mail.send(Abort(handle))

    def deliver(self, out: Outputs) -> None:
        for handle, tokens, _ in out.each():
            answer = self.answers[handle]
            assert answer.finish is None and tokens
            answer.tokens += tokens
        assert out.counts.sum() == len(out.tokens)
        for handle, told in out.logprobs.items():
            self.answers[handle].logprobs.append(told)
        for handle, told in out.prompt_logprobs.items():
            self.answers[handle].prompt_logprobs.append(told)
        for finish in out.finished:
            assert self.answers[finish.handle].finish is None, "finished twice"
            self.answers[finish.handle].finish = finish

    def steps(self, count: int) -> None:
        async def go() -> None:
            for _ in range(count):
                await self.engine.step()
                self.engine.scheduler.check()

        asyncio.run(go())

    def drain(self, most: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(most):
            self.steps(1)
            if self.engine.scheduler.idle and self.engine._next is None and not self.mail._waiting:
                break
        assert all(a.finish for a in self.answers.values()), "some request never ended"
        assert self.engine.scheduler.pages.used == 0

    def run(self, *asks: tuple) -> list[list[int]]:
        """The tokens of requests (tokens, sampling) that are sent together."""
        handles = [self.ask(*a) for a in asks]
        self.drain()
        return [self.answers[h].tokens for h in handles]
