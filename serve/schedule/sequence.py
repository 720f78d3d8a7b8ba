"""A request on its way through the engine: what is not in the table's arrays, and its tokens wherever they are."""

from dataclasses import dataclass, field

import numpy as np

from serve.request import Ask
from serve.schedule.pages import NOTHING, SALT, Run, chain
from serve.schedule.table import Table


@dataclass(eq=False)
class Sequence:
    """``slot`` 0 while it waits. ``output`` holds what had been generated when it was preempted."""

    ask: Ask
    order: int  # of arrival
    since: int  # step at which it began to wait
    rank: tuple = ()
    slot: int = 0
    epoch: int = 0
    planned: int = 0  # prompt tokens scheduled, computed or in flight
    target: int = 0  # tokens the prefill must reach
    told: int = 0  # prompt positions whose log-probabilities went out
    cached: int = 0
    replayed: int = 0
    names: list[bytes] = field(default_factory=list)  # of the pages it may find: those that came with the request
    own: list[bytes] = field(default_factory=list)  # of the pages behind these, as they fill
    run: Run = NOTHING  # what was found in the cache when it was last looked up
    output: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def handle(self) -> int:
        return self.ask.handle

    @property
    def total(self) -> int:
        """Tokens to compute before it can go on: prompt, and what it had generated when it was preempted."""
        return len(self.ask.tokens) + len(self.output)

    def cacheable(self, page_size: int) -> bool:
        """Whether its pages may be named: a front end that sent no hashes for whole pages asked for none."""
        return bool(self.ask.hashes) or len(self.ask.tokens) < page_size

    def tokens(self, begin: int, end: int, table: Table | None = None) -> np.ndarray:
        """Tokens [end - begin] int32; generated ones come from ``table`` while the sequence has a slot."""
        prompt = len(self.ask.tokens)
        if end <= prompt:
            return self.ask.tokens[begin:end]
        made = self.output if table is None else table.generated[self.slot]
        if begin >= prompt:
            return made[begin - prompt : end - prompt].copy()
        return np.concatenate((self.ask.tokens[begin:prompt], made[: end - prompt]))

    def named(self, first: int, end: int, table: Table) -> list[bytes]:
        """The names of its full pages [first, end)."""
        given, size = len(self.names), table.page_size
        if end <= given:
            return self.names[first:end]
        have = given + len(self.own)
        if have < end:
            before = [*self.names[-1:], *self.own[-1:]][-1] if have else SALT
            self.own += chain(self.tokens(have * size, end * size, table), size, before)
        return self.names[first:] + self.own[max(0, first - given) : end - given]
