"""A progress bar for a run that ends by time or by a number of requests: share, requests a second, time left."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from serve.clock import Clock
from serve.load.drive import Record


class Bar:
    """``ended`` is called with each record. Until `begin`, what is shown is the warm-up."""

    def __init__(self, shown: Progress, clock: Clock, total: float, by_time: bool):
        self.shown, self.clock, self.by_time = shown, clock, by_time
        self.task = shown.add_task("warm-up", total=total, told="")
        self.begun: float | None = None
        self.warm = self.count = self.tokens = 0

    def ended(self, record: Record) -> None:
        if record.warmup:
            self.warm += 1
            self.shown.update(self.task, told=f"{self.warm} requests")
            return
        now = self.clock.now()
        self.begun = record.sent_s if self.begun is None else self.begun
        self.count += 1
        self.tokens += record.usage.output_tokens
        passed = max(1e-9, now - self.begun)
        told = f"{self.count} requests, {self.count / passed:.2f}/s, {self.tokens / passed:,.0f} tokens/s"
        self.shown.update(
            self.task, completed=passed if self.by_time else self.count, description="playing", told=told
        )  # fmt: skip


@contextmanager
def bar(clock: Clock, duration_s: float | None, requests: int | None) -> Iterator[Bar]:
    """By requests where their number is known, else by time."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[told]}"),
    )
    total = requests if requests is not None else duration_s
    with Progress(*columns, console=Console(file=sys.stderr)) as shown:
        yield Bar(shown, clock, total, requests is None)
