"""A router between a front end that remembers and engines without a model, all stepped by the test: they answer, hand
over, die, come back, repeat themselves and speak of requests that are over."""

import random
from dataclasses import dataclass, field, replace

import numpy as np

from serve.request import Abort, Ask, Finish, Outputs, Sampling
from serve.router.choice import RouterRules
from serve.router.fleet import Post
from serve.router.router import Router
from serve.schedule.pages import chain
from tests.serve.fake import FakeEngine, babble

VOCAB, PAGE = 512, 4
RULES = RouterRules()
ANSWER = babble(VOCAB)
PD = {"prefill": ("prefill", 2, 1), "decode": ("decode", 2, 2)}  # pool -> role, groups, ranks of a group
BOTH = {"engine": ("both", 3, 2)}


def posts(pools: dict[str, tuple[str, int, int]]) -> list[Post]:
    return [
        Post(f"{pool}{i}.{rank}", f"{pool}{i}", role)
        for pool, (role, groups, ranks) in pools.items()
        for i in range(groups)
        for rank in range(ranks)
    ]


class Box:
    """An engine's mail."""

    def __init__(self):
        self.sent: list[Ask | Abort] = []
        self.told: list[Outputs] = []

    def take(self) -> list[Ask | Abort]:
        taken, self.sent = self.sent, []
        return taken

    def put(self, outputs: Outputs) -> None:
        self.told.append(outputs)


@dataclass
class Told:
    """What the front end has of a request."""

    tokens: list[int] = field(default_factory=list)
    rows: int = 0
    chosen: int = 0  # log-probabilities
    finish: Finish | None = None


class Rack:
    """``now`` is set by the test. Engines of a group are made when it starts and forgotten when it dies."""

    def __init__(self, pools=PD, rules=RULES, seed: int = 0, first: int = 1):
        self.random = random.Random(seed)
        self.posts = posts(pools)
        self.groups = list(dict.fromkeys(p.group for p in self.posts))
        self.engines: dict[str, FakeEngine] = {}
        self.asks: dict[int, Ask] = {}
        self.told: dict[int, Told] = {}
        self.sent: list[tuple[str, Ask | Abort]] = []
        self.now = 0.0
        self.connect(rules, first)

    def connect(self, rules: RouterRules, first: int) -> None:
        """A router that knows nothing, in front of the engines there are."""
        self.router = Router(self.posts, rules, PAGE, self.to_engine, self.to_front, lambda: self.now, first)
        for group in self.groups:
            if any(e.name in {p.name for p in self.posts if p.group == group} for e in self.engines.values()):
                self.router.joined(group)

    # --- engines ---

    def start(self, *groups: str) -> None:
        for group in groups or self.groups:
            for post in self.posts:
                if post.group == group:
                    seed = self.random.randrange(1000)
                    self.engines[post.name] = FakeEngine(Box(), ANSWER, seed, chunk=3, name=post.name)
            self.router.joined(group)

    def kill(self, group: str) -> None:
        for post in self.posts:
            if post.group == group:
                self.engines.pop(post.name, None)
        self.router.lost(group, f"{group} died")

    def up(self, group: str) -> bool:
        return any(p.name in self.engines for p in self.posts if p.group == group)

    def to_engine(self, name: str, message: Ask | Abort) -> None:
        assert name in self.engines, f"{name} is dead"
        self.sent.append((name, message))
        self.engines[name].mailbox.sent.append(message)
        if isinstance(message, Ask) and message.handoff is not None:
            lender = self.engines.get(message.handoff.engine)
            if lender is not None:  # it fetches at once, and gives the lease back
                lender.returned(message.handoff)

    def step(self, name: str, repeat: bool = False) -> None:
        """One step of an engine; ``repeat``: what ended is told twice, and tokens for a request that is over."""
        engine = self.engines[name]
        engine.step()
        told, engine.mailbox.told = engine.mailbox.told, []
        for outputs in told:
            self.router.deliver(name, outputs)
            if repeat:
                stale = [f.handle for f in outputs.finished] + [h.handle for h in outputs.handed]
                arrays = np.array(stale, np.int64), np.ones(len(stale), np.int32), np.full(len(stale), 7, np.int32)
                self.router.deliver(name, Outputs(*arrays, finished=outputs.finished, handed=outputs.handed))
        self.router.check()

    # --- the front end ---

    def ask(self, handle: int, prompt: np.ndarray, sampling: Sampling, session: str = "") -> None:
        ask = Ask(handle, prompt.astype(np.int32), chain(prompt.astype(np.int32), PAGE), sampling, session=session)
        self.asks[handle], self.told[handle] = ask, Told()
        self.router.send(ask)
        self.router.check()

    def to_front(self, outputs: Outputs) -> None:
        assert outputs, "nothing was told"
        for handle, rows in outputs.prompt_logprobs.items():
            self.told[handle].rows += len(rows.chosen)
            assert not self.told[handle].tokens, "the prompt comes before the completion"
        for handle, tokens, logprobs in outputs.each():
            told = self.told[handle]
            assert told.finish is None, "tokens after the end"
            told.tokens += tokens
            told.chosen += 0 if logprobs is None else len(logprobs.chosen)
        for finish in outputs.finished:
            assert self.told[finish.handle].finish is None, "two ends"
            self.told[finish.handle].finish = finish
            assert 0 <= finish.cached_tokens <= len(self.asks[finish.handle].tokens)

    @property
    def open(self) -> list[int]:
        return [h for h, t in self.told.items() if t.finish is None]

    def play(self, steps: int = 500) -> None:
        """Step every engine until nothing is open."""
        for _ in range(steps):
            for name in list(self.engines):
                if name in self.engines:
                    self.step(name)
            if not self.open:
                return
        raise AssertionError(f"open after {steps} steps: {self.open}")

    def want(self, handle: int) -> tuple[list[int], str]:
        """What one engine would tell, and why it would end."""
        box = Box()
        engine = FakeEngine(box, ANSWER)
        box.sent.append(replace(self.asks[handle]))
        tokens: list[int] = []
        while True:
            engine.step()
            out = box.told.pop()
            tokens += out.tokens.tolist()
            if out.finished:
                return tokens, out.finished[0].reason

    def verify(self, handle: int) -> None:
        """It got what one engine gives, whole or, where it was aborted or failed, up to some point."""
        told, (tokens, reason) = self.told[handle], self.want(handle)
        if told.finish.reason in ("stop", "length"):
            assert (told.tokens, told.finish.reason) == (tokens, reason)
        else:
            assert told.tokens == tokens[: len(told.tokens)]
        s = self.asks[handle].sampling
        assert told.chosen == (0 if s.logprobs is None else len(told.tokens))
        if s.prompt_logprobs is not None and told.tokens:
            assert told.rows == len(self.asks[handle].tokens) - 1

    def idle(self) -> None:
        """Nothing is left anywhere."""
        for name in list(self.engines):
            self.step(name)
        self.router.check()
        assert self.router.open == 0 and not any(e.running or e.lent for e in self.engines.values())
