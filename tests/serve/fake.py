"""An engine without a model, for tests of what stands in front of one: it answers Asks with text known beforehand."""

import asyncio
import random
from collections.abc import Callable

import numpy as np

from serve.request import Abort, Ask, Bye, Finish, Logprobs, Outputs, Sampling

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


class FakeEngine:
    """Steps of random size: every running request gets 1 to ``most`` tokens a step, as with drafts."""

    def __init__(self, mailbox, answer: Callable[[Ask], list[int]], seed: int = 0, most: int = 4, pause_s: float = 0.0):
        self.mailbox, self.answer, self.most, self.pause_s = mailbox, answer, most, pause_s
        self.random = random.Random(seed)
        self.running: dict[int, list] = {}  # handle -> [ask, tokens to come, tokens given]
        self.asks: list[Ask] = []  # the last KEPT there were
        self.steps = 0
        self.leaving = False

    async def run(self, pause=None) -> None:
        while not self.leaving:
            await self.step()
            await asyncio.sleep(self.pause_s)

    async def step(self) -> None:
        if not self.running:
            await self.mailbox.wait()
        finished: list[Finish] = []
        prompts: dict[int, Logprobs] = {}
        for message in self.mailbox.take():
            if isinstance(message, Bye):
                self.leaving = True
            elif isinstance(message, Abort):
                if self.running.pop(message.handle, None):
                    finished.append(Finish(message.handle, "abort", cached_tokens=1))
            else:
                self.asks = [*self.asks[1 - KEPT :], message]
                self.running[message.handle] = [message, self.answer(message), 0]
                k = message.sampling.prompt_logprobs
                if k is not None:
                    prompts[message.handle] = rows(message.tokens[1:].tolist(), 1, k)
        self.mailbox.put(self.outputs(finished, prompts))
        self.steps += 1

    def outputs(self, finished: list[Finish], prompts: dict[int, Logprobs]) -> Outputs:
        handles, counts, tokens, logprobs = [], [], [], {}
        for handle, (ask, to_come, given) in list(self.running.items()):
            new, ended = self.draw(ask.sampling, to_come, given)
            if new:
                handles.append(handle)
                counts.append(len(new))
                tokens += new
                if ask.sampling.logprobs is not None:
                    logprobs[handle] = rows(new, len(ask.tokens) + given, ask.sampling.logprobs)
            self.running[handle][2] = given + len(new)
            if ended:
                del self.running[handle]
                finished.append(Finish(handle, ended, cached_tokens=len(ask.tokens) // 2))
        arrays = np.array(handles, np.int64), np.array(counts, np.int32), np.array(tokens, np.int32)
        return Outputs(*arrays, logprobs, prompts, finished, {"running": len(self.running), "steps_total": self.steps})

    def draw(self, s: Sampling, to_come: list[int], given: int) -> tuple[list[int], str | None]:
        """The next tokens, and why it ends, if it does."""
        new = []
        for token in to_come[given : given + self.random.randint(1, self.most)]:
            if token in s.stop_ids and given + len(new) >= s.min_tokens:
                return new, "stop"
            new.append(token)
            if given + len(new) == s.max_tokens:
                return new, "length"
        return new, None
