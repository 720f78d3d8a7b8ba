"""Virtual time for tests: an event loop that jumps to its next timer, and a client that takes modelled time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from serve.clock import LoopClock
from serve.load.client import LoadRequest, Usage


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        super().__init__()
        self.now, wait = 0.0, self._selector.select

        def select(timeout: float | None):
            if timeout is None:
                raise RuntimeError("everything waits and nothing is due")
            self.now += timeout
            return wait(0)

        self._selector.select = select

    def time(self) -> float:
        return self.now


def play(work: Coroutine) -> Any:
    """Run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class FakeClient:
    """First token after ``per_prompt`` seconds a token, then ``per_token`` each. ``cached(request)`` tells hits;
    ``fails(request)`` gives the message of a failure, or "". ``requests`` keeps what it was asked."""

    def __init__(self, per_prompt=1e-4, per_token=0.01, cached=lambda r: 0, fails=lambda r: ""):
        self.clock, self.per_prompt, self.per_token = LoopClock(), per_prompt, per_token
        self.cached, self.fails = cached, fails
        self.requests: list[LoadRequest] = []
        self.open = 0

    async def complete(self, request: LoadRequest, arrived) -> Usage:
        self.requests.append(request)
        self.open += 1
        try:
            await self.clock.sleep(self.per_prompt * len(request.tokens))
            if message := self.fails(request):
                return Usage("error", len(request.tokens), message=message)
            for _ in range(request.max_tokens):
                arrived(self.clock.now(), 1)
                await self.clock.sleep(self.per_token)
            return Usage("length", len(request.tokens), request.max_tokens, self.cached(request))
        finally:
            self.open -= 1

    def bytes(self) -> list[tuple]:
        return [(r.tokens.tobytes(), r.max_tokens, r.session, r.turn, r.lane, r.warmup) for r in self.requests]


VOCAB = np.arange(8, 200, dtype=np.int32)
