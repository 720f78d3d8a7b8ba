"""Write text: complete a prompt, or each line of a file.

    python -m scripts.generate prompt='def f(n):' [max_tokens=] [temperature=] [seed=] [speculate=true]

Text goes to stdout as it comes, figures to stderr, one JSON line ends stdout.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.build import Settings, build_runner
from scripts.entry import entry
from scripts.report import note_capped
from serve import offline
from serve.offline import Completion
from serve.request import Sampling


def read_prompts(s: Settings) -> list[str]:
    """The prompts of ``prompt=`` or ``prompt_file=``. Raises ValueError where there are none, or one is empty."""
    if s.prompt is not None and s.prompt_file is not None:
        raise ValueError("prompt and prompt_file are both given: leave one out")
    if s.prompt is not None:
        if s.prompt == "":
            raise ValueError("prompt is empty: give at least one character")
        return [whole(s.prompt, "prompt")]
    if s.prompt_file is None:
        raise ValueError("no prompt: give prompt='...' or prompt_file=FILE (one prompt a line; `-` is standard input)")
    lines = read_file(s.prompt_file).removesuffix("\n").split("\n")
    if lines == [""]:
        raise ValueError(f"prompt_file={s.prompt_file} is empty: give one prompt a line")
    for number, line in enumerate(lines, start=1):
        if line == "":
            raise ValueError(f"prompt_file={s.prompt_file}, line {number}: the prompt is empty")
    return lines


def read_file(name: str) -> str:
    if name != "-" and not Path(name).is_file():
        raise ValueError(f"prompt_file={name}: no such file")
    raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        return raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt_file={name} is not UTF-8: {error.reason} at byte {error.start}") from None


def whole(text: str, name: str) -> str:
    """``text``, if it is made of characters: bytes of another encoding on the command line are not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 at character {error.start}") from None
    return text


class Printer:
    """Prints completions in order: the first that is not finished as it comes, those after it when their turn comes."""

    def __init__(self, prompts: Sequence[str], text, echo: bool):
        self.prompts, self.echo = prompts, echo
        self.streams = [text.stream() for _ in prompts]
        self.waiting = [""] * len(prompts)
        self.turn = -1

    def begin(self, index: int) -> None:
        """Prompt ``index`` has the floor: its header, where there are several, and what it has said so far."""
        self.turn = index
        head = f"=== {index + 1} of {len(self.prompts)} ===\n" if len(self.prompts) > 1 else ""
        self.write(head + (self.prompts[index] if self.echo else "") + self.waiting[index])

    def push(self, index: int, ids: list[int]) -> None:
        piece = self.streams[index].push(ids)
        if index == self.turn:
            self.write(piece)
        else:
            self.waiting[index] += piece

    def end(self, index: int) -> None:
        """Prompt ``index`` is finished, and so are those before it."""
        if index != self.turn:
            self.begin(index)
        self.write(self.streams[index].flush() + "\n")

    @staticmethod
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def acceptance_length(done: Sequence[Completion]) -> float | None:
    """Tokens a decode step gave, the stop token included; None where there was no such step. The first token of a
    completion comes from the prefill."""
    steps = sum(c.steps for c in done)
    tokens = sum(len(c.tokens) - 1 + (c.finish == "stop") for c in done)
    return tokens / steps if steps else None


def run(s: Settings) -> dict:
    """Complete the prompts, a batch at a time, and report."""
    prompts = read_prompts(s)
    runner, text = build_runner(s)
    sampling = Sampling(s.max_tokens, s.temperature, s.seed, (text.eos_id,))
    ids = [np.array(text.prompt(p), np.int64) for p in prompts]
    for tokens in ids:
        runner.check(tokens)
    note_capped([len(tokens) for tokens in ids], s.max_tokens, runner.context)
    printer, done, seconds = Printer(prompts, text, s.echo), [], 0.0
    for first in range(0, len(ids), s.serve.max_batch):
        batch = ids[first : first + s.serve.max_batch]
        printer.begin(first)
        start = time.perf_counter()
        say = lambda i, new, first=first: printer.push(first + i, new)  # noqa: E731
        done += offline.generate(runner, batch, [sampling] * len(batch), s.speculate, say)
        seconds += time.perf_counter() - start
        for index in range(first, first + len(batch)):
            printer.end(index)
    return summary(s, ids, done, seconds)


def summary(s: Settings, ids: Sequence[np.ndarray], done: Sequence[Completion], seconds: float) -> dict:
    tokens, accepted = sum(len(c.tokens) for c in done), acceptance_length(done)
    rate = tokens / seconds
    told = f", {accepted:.2f} tokens a step" if accepted is not None else ""
    print(f"{tokens} tokens in {seconds:.2f} s: {rate:.1f} tokens/s{told}", file=sys.stderr)
    return {
        "tokens": tokens,
        "tok_per_s": rate,
        "checkpoint": s.checkpoint,
        "acceptance_length": accepted,
        "prompts": len(ids),
        "prompt_tokens": sum(len(i) for i in ids),
        "steps": sum(c.steps for c in done),
        "stopped": sum(c.finish == "stop" for c in done),
        "seconds": seconds,
        "speculate": s.speculate,
        "numerics": s.numerics,
        "cache": s.cache,
        "kernels": ",".join(sorted(set(s.kernels.names().values()))),
        "temperature": s.temperature,
        "seed": s.seed,
    }


if __name__ == "__main__":
    entry(run)
