"""A session made ready for play: its streams, its requests in document order, and the prompt of each.

S steps (requests) of the tree.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from serve.load.client import LoadRequest
from serve.load.filler import Filler, Scale, bust, marked
from serve.load.records import Session, Subagent, Turn

SUBAGENTS = ("shared", "isolated")  # whether a subagent's block ids mean what they mean in its parent


@dataclass(frozen=True, eq=False)
class Step:
    """One request. ``start_s`` and ``end_s`` count from the session's start."""

    number: int  # in document order
    start_s: float
    end_s: float
    turn: Turn
    branch: "Branch"


@dataclass(eq=False)
class Branch:
    """One conversation: the root, or a subagent."""

    name: str  # "" for the root
    start_s: float
    background: bool
    head_tokens: int
    events: list["Step | Branch"] = field(default_factory=list)

    def steps(self) -> Iterator[Step]:
        """Those of the branch itself."""
        return (e for e in self.events if isinstance(e, Step))

    def every(self) -> Iterator[Step]:
        """Those of its subagents too, in document order."""
        for event in self.events:
            if isinstance(event, Step):
                yield event
            else:
                yield from event.every()

    def branches(self) -> Iterator["Branch"]:
        yield self
        for event in self.events:
            if isinstance(event, Branch):
                yield from event.branches()


@dataclass(frozen=True, eq=False)
class Tree:
    session: Session
    root: Branch
    steps: list[Step]  # [S] in document order
    dropped: int  # requests left out because they are too long

    def in_time(self) -> list[Step]:
        return sorted(self.steps, key=lambda s: (s.start_s, s.number))


def tree(session: Session, scale: Scale, max_tokens: int | None = None) -> Tree:
    """Requests of more than ``max_tokens`` played tokens, prompt and output together, are left out."""
    made: list[Step] = []
    dropped = 0

    def fill(branch: Branch, events: tuple[Turn | Subagent, ...]) -> Branch:
        nonlocal dropped
        for event in events:
            at = branch.start_s + event.start_s
            if isinstance(event, Subagent):
                name = f"{branch.name}/{event.name}"
                branch.events.append(fill(Branch(name, at, event.background, event.head_tokens), event.events))
            elif max_tokens and scale.prompt(event.input_tokens) + scale.output(event.output_tokens) > max_tokens:
                dropped += 1
            else:
                made.append(Step(len(made), at, at + (event.call_s or 0.0), event, branch))
                branch.events.append(made[-1])
        return branch

    root = fill(Branch("", 0.0, False, session.head_tokens), session.events)
    return Tree(session, root, made, dropped)


class Play:
    """One performance of a tree: number ``play`` of the run, in ``lane``. Its prompts carry a mark of their own."""

    def __init__(self, made: Tree, scale: Scale, vocab: np.ndarray, seed: int, play: int, lane: int, subagents: str):
        self.tree, self.scale, self.number, self.lane = made, scale, play, lane
        self._vocab, self._seed, self._isolated = vocab, seed, subagents == "isolated"
        self._mark = bust(seed, play, vocab)
        self._fillers: dict[str, Filler] = {}

    def request(self, step: Step, warmup: bool = False) -> LoadRequest:
        """The request of a step; a warm-up one asks for a single token."""
        turn, branch = step.turn, step.branch
        ids, length = turn.ids, self.scale.prompt(turn.input_tokens)
        body = self._filler(branch).prompt(ids, max(1, length), step.number)
        tokens = marked(body, self._mark, self.scale.prompt(branch.head_tokens))
        return LoadRequest(
            tokens=tokens,
            max_tokens=1 if warmup else self.scale.output(turn.output_tokens),
            affinity=f"{self.tree.session.name}-{self.number}",
            session=self.tree.session.name + branch.name,
            turn=step.number,
            lane=self.lane,
            warmup=warmup,
        )

    def _filler(self, branch: Branch) -> Filler:
        name = self.tree.session.name + (branch.name if self._isolated else "")
        if name not in self._fillers:
            self._fillers[name] = Filler(self._seed, name, self._vocab, self.scale.width)
        return self._fillers[name]
