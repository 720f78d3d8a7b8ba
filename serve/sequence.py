"""A request on its way through the engine: what is not in the table's arrays, and its tokens wherever they are."""

from dataclasses import dataclass, field

import numpy as np

from serve.pages import SALT, chain
from serve.request import Ask
from serve.table import Table


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
    names: list[bytes] = field(default_factory=list)
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
        return np.concatenate((self.ask.tokens[begin:prompt], made[max(begin - prompt, 0) : end - prompt]))

    def name(self, page: int, page_size: int, table: Table) -> bytes:
        """The name of its full page number ``page``; those of the prompt came with the request."""
        while len(self.names) <= page:
            at = len(self.names)
            before = self.names[-1] if self.names else SALT
            self.names += chain(self.tokens(at * page_size, (at + 1) * page_size, table), page_size, before)
        return self.names[page]
