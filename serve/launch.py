"""The real runner port: a plan becomes one step on the device, and what it drew comes back.

A simulation has another class with `launch` and `collect`; the engine sees no difference.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from serve.lockstep import Shape
from serve.runner import Runner
from serve.schedule.plan import Drawn, Plan
from serve.settings import Serve
from serve.step import Step


class StepRunner:
    """``overlap`` runs steps on a thread, so that the loop can plan meanwhile. ``now`` is the clock's, in seconds."""

    def __init__(self, runner: Runner, serve: Serve, now: Callable[[], float]):
        self.runner, self.serve, self.now = runner, serve, now
        threads = torch.get_num_threads()  # a setting of each thread
        start = lambda: torch.set_num_threads(threads)  # noqa: E731
        self._thread = ThreadPoolExecutor(1, "step", start) if serve.overlap else None

    def launch(self, plan: Plan, shape: Shape | None = None) -> "Drawn | Future[Drawn]":
        """Start the step, padded to ``shape``. The plan must be settled: the table is read here."""
        if not len(plan) and shape is None:
            return Drawn.empty()  # all of its sequences ended before it was launched
        step = Step(self.runner, self.serve, plan, shape or Shape())
        return self._timed(step) if self._thread is None else self._thread.submit(self._timed, step)

    async def collect(self, ticket: "Drawn | Future[Drawn]") -> Drawn:
        """What the step drew; waits for it."""
        return ticket if isinstance(ticket, Drawn) else await asyncio.wrap_future(ticket)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _timed(self, step: Step) -> Drawn:
        begin = self.now()
        drawn = step.run()
        drawn.device_s = self.now() - begin
        return drawn
