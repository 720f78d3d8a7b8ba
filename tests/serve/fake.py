"""An engine without a model, for tests of what stands in front of one: it answers Asks with text known beforehand."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serve.disagg.handoff import Handoff
from serve.request import Abort, Ask, Bye, Finish, Handed, Logprobs, Outputs, Pause

VOCAB_ROOM = 1 << 20


def script(text: str, encode: Callable[[str], list[int]]) -> Callable[[Ask], list[int]]:
    """Answer every Ask with the same text, over and over."""
    ids = encode(text)
    return lambda ask: ids * -(-ask.sampling.max_tokens // len(ids))


def babble(vocab_size: int) -> Callable[[Ask], list[int]]:
    """Tokens that depend on the prompt and, unless greedy, on the seed, and on nothing else."""

    def answer(ask: Ask) -> list[int]:
        s = ask.sampling
        draw = random.Random(f"{ask.tokens.tolist()} {s.seed if s.temperature else 'greedy'}")
        return [draw.randrange(4, vocab_size) for _ in range(s.max_tokens)]

    return answer


def logprob(token: int, place: int) -> float:
    return -((token * 7 + place) % 97) / 16


def rows(tokens: list[int], first: int, k: int) -> Logprobs:
    """Log-probabilities of tokens at places first, first + 1, ...: made up, the chosen one the best."""
    chosen = np.array([logprob(t, first + i) for i, t in enumerate(tokens)], np.float32)
    ids = np.array([[(t + j) % VOCAB_ROOM for j in range(k)] for t in tokens], np.int32).reshape(len(tokens), k)
    return Logprobs(
        chosen, ids, chosen[:, None] - np.arange(k, dtype=np.float32) if k else np.zeros(ids.shape, np.float32)
    )


KEPT = 500  # requests


@dataclass(eq=False)
class Running:
    ask: Ask
    to_come: list[int]
    given: int  # tokens, those of earlier tries included
    rows: int  # of the prompt's log-probabilities, how many were told


class FakeEngine:
    """Steps of random size: every running request gets 1 to ``most`` tokens a step, as with drafts. Log-probabilities
    of prompts come ``chunk`` rows a step, before the first token. Who is lent what an Ask left (``lent``) goes on with
    it, and says nothing to the lender: `returned` is for a test to call."""

    def __init__(
        self, mailbox, answer: Callable[[Ask], list[int]], seed: int = 0, most: int = 4, pause_s: float = 0.0,
        chunk: int = 1 << 20, name: str = "engine",
    ):  # fmt: skip
        self.mailbox, self.answer, self.most, self.pause_s = mailbox, answer, most, pause_s
        self.chunk, self.name = chunk, name
        self.random = random.Random(seed)
        self.running: dict[int, Running] = {}  # by handle
        self.lent: dict[int, Handoff] = {}
        self.asks: list[Ask] = []  # the last KEPT there were
        self.steps = 0
        self.leaving = self.paused = False

    async def run(self, pause=None) -> None:
        while not self.leaving:
            if not self.running:
                await self.mailbox.wait()
            self.step()
            await asyncio.sleep(self.pause_s)

    def step(self) -> None:
        finished: list[Finish] = []
        for message in self.mailbox.take():
            if isinstance(message, Bye):
                self.leaving = True
            elif isinstance(message, Pause):
                self.paused = message.on
            elif isinstance(message, Abort):
                self.lent.pop(message.handle, None)
                if self.running.pop(message.handle, None):
                    finished.append(Finish(message.handle, "abort", cached_tokens=1))
            else:
                self.asks = [*self.asks[1 - KEPT :], message]
                given = len(message.generated)
                rows = 0 if message.sampling.prompt_logprobs is not None and not given else len(message.tokens)
                self.running[message.handle] = Running(message, self.answer(message), given, rows)
        if not self.paused:
            self.mailbox.put(self.outputs(finished))
        self.steps += 1

    def outputs(self, finished: list[Finish]) -> Outputs:
        handles, counts, tokens, logprobs, prompts, handed = [], [], [], {}, {}, []
        for handle, one in list(self.running.items()):
            self.prompt(handle, one, prompts)
            if one.rows < len(one.ask.tokens) - 1:
                continue
            new, ended = self.draw(one)
            if new:
                handles.append(handle)
                counts.append(len(new))
                tokens += new
                if one.ask.sampling.logprobs is not None:
                    logprobs[handle] = rows(new, len(one.ask.tokens) + one.given, one.ask.sampling.logprobs)
            one.given += len(new)
            cached = len(one.ask.tokens) // 2
            if ended:
                finished.append(Finish(handle, ended, cached_tokens=cached))
            elif one.ask.hand_over:
                self.lent[handle] = self.lend(handle, one)
                handed.append(Handed(handle, self.lent[handle], cached, 1))
            if ended or one.ask.hand_over:
                del self.running[handle]
        arrays = np.array(handles, np.int64), np.array(counts, np.int32), np.array(tokens, np.int32)
        stats = {"running": len(self.running), "pages_used": len(self.running)}
        return Outputs(*arrays, logprobs, prompts, finished, {**stats, "steps_total": self.steps}, handed)

    def prompt(self, handle: int, one: Running, prompts: dict[int, Logprobs]) -> None:
        """The next stretch of its prompt's rows, if they are wanted."""
        wanted = one.ask.tokens[1 + one.rows : 1 + one.rows + self.chunk].tolist()
        if wanted:
            prompts[handle] = rows(wanted, 1 + one.rows, one.ask.sampling.prompt_logprobs)
            one.rows += len(wanted)

    def draw(self, one: Running) -> tuple[list[int], str | None]:
        """The next tokens, and why it ends, if it does."""
        s, new = one.ask.sampling, []
        most = 1 if one.ask.hand_over else self.random.randint(1, self.most)
        for token in one.to_come[one.given : one.given + most]:
            if token in s.stop_ids and one.given + len(new) >= s.min_tokens:
                return new, "stop"
            new.append(token)
            if one.given + len(new) == s.max_tokens:
                return new, "length"
        return new, None

    def lend(self, handle: int, one: Running) -> Handoff:
        tokens = len(one.ask.tokens) + one.given - 1
        pages = np.arange(1, 2 + (tokens - 1) // 64, dtype=np.int32)
        return Handoff(self.name, 1, handle, tokens, 64, pages, 1)

    def returned(self, handoff: Handoff) -> None:
        self.lent.pop(handoff.lease, None)
