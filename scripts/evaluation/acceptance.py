"""Accepted tokens a step on held-out prompts, in and outside repetition loops, and drafted against undrafted output."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np

from scripts import report
from scripts.evaluation import calibration
from scripts.evaluation.given import Given, groups
from scripts.progress import progress
from serve import offline
from serve.offline import Verdict
from serve.request import Sampling
from serve.runner import Runner

LOOP_TOKENS = 32  # a stretch at least this long that repeats itself ...
LOOP_PERIOD = 16  # ... after at most this many tokens is a loop
BYTES_A_TOKEN = 16  # more than a token has: enough text for a prompt


def openings(text, pieces: Sequence[bytes], count: int, tokens: int) -> list[np.ndarray]:
    """``count`` prompts: BOS and the first ``tokens`` ids from the starts of lines spread evenly over the pieces."""
    out = []
    joined = b"\n".join(pieces)
    for i in range(count):
        start = joined.find(b"\n", i * len(joined) // count) + 1
        ids = text.prompt(joined[start : start + tokens * BYTES_A_TOKEN].decode("utf-8", "ignore"))
        out.append(np.array(ids[: tokens + 1], np.int64))
    return out


def in_loop(tokens: Sequence[int]) -> np.ndarray:
    """bool [len(tokens)]: tokens that repeat an earlier one within a stretch of LOOP_TOKENS that has a short period."""
    ids = np.asarray(tokens, np.int64)
    found = np.zeros(len(ids), bool)
    for period in range(1, LOOP_PERIOD + 1):
        same = np.concatenate(([False], ids[period:] == ids[:-period], [False])) if len(ids) > period else np.zeros(2)
        edges = np.flatnonzero(np.diff(same.astype(np.int8)))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):  # rows begin .. end repeat, `period` later
            if end - begin + period >= LOOP_TOKENS:
                found[begin + period : end + period] = True
    return found


@dataclass
class Tally:
    """Tokens and decode steps of drafted completions, all and outside loops."""

    tokens: int = 0
    steps: int = 0
    outside_tokens: int = 0
    outside_steps: int = 0
    mismatches: int = 0

    def add(self, emitted: Sequence[list[int]]) -> None:
        """``emitted``: what each step of one completion gave, the prefill's token first, which no draft made."""
        looped = in_loop([t for step in emitted for t in step])
        at = len(emitted[0]) if emitted else 0
        for step in emitted[1:]:
            self.tokens += len(step)
            self.steps += 1
            if not looped[at : at + len(step)].any():
                self.outside_tokens += len(step)
                self.outside_steps += 1
            at += len(step)

    def plus(self, other: "Tally") -> "Tally":
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def figures(self, suffix: str = "") -> dict[str, float | None]:
        share = lambda a, b: a / b if b else None  # noqa: E731
        return {
            f"acceptance_length{suffix}": share(self.tokens, self.steps),
            f"acceptance_length_outside_loops{suffix}": share(self.outside_tokens, self.outside_steps),
            f"loop_share{suffix}": share(self.tokens - self.outside_tokens, self.tokens),
        }


@dataclass
class Steps:
    """What each step of each completion gave."""

    emitted: dict[int, list[list[int]]] = field(default_factory=dict)

    def take(self, index: int, new: list[int]) -> None:
        self.emitted.setdefault(index, []).append(list(new))


def measure(
    runner: Runner, prompts: Sequence[np.ndarray], sampling: Sampling, batch: int, advance: Callable[[int], None]
) -> tuple[Tally, list[Verdict]]:
    """Complete every prompt drafted and undrafted; ``advance`` is told of prompts done. A mismatch is a prompt whose
    two completions differ. Also what became of each block of drafts."""
    tally, verdicts = Tally(), []
    for group in groups(prompts, batch, advance):
        steps = Steps()
        drafted = offline.generate(runner, group, [sampling] * len(group), True, steps.take, verdicts.append)
        undrafted = offline.generate(runner, group, [sampling] * len(group), False)
        for i, (one, other) in enumerate(zip(drafted, undrafted, strict=True)):
            tally.add(steps.emitted.get(i, []))
            tally.mismatches += (one.tokens, one.finish) != (other.tokens, other.finish)
    return tally, verdicts


def run(g: Given) -> dict:
    """Acceptance lengths and the number of prompts whose drafted output differs, greedy and sampled; acceptance by
    position, and whether the drafter knows (calibration.py)."""
    s, e = g.settings, g.settings.evaluate
    prompts = openings(g.text, g.held, e.prompts, e.prompt_tokens)
    report.note_capped([len(p) for p in prompts], s.max_tokens, g.runner.context)
    modes = {"greedy": 0.0, "sampled": e.temperature}
    tallies, total, verdicts = {}, Tally(), []
    with progress("drafted and undrafted", len(prompts) * len(modes), "prompts") as advance:
        for name, temperature in modes.items():
            how = Sampling(s.max_tokens, temperature, s.seed, (g.text.eos_id,))
            tallies[name], found = measure(g.runner, prompts, how, s.serve.max_batch, advance)
            total, verdicts = total.plus(tallies[name]), verdicts + found
    heads = ("", "tokens a step", "outside loops", "tokens in loops", "mismatches")
    rows = [(name, *t.figures().values(), t.mismatches) for name, t in {**tallies, "both": total}.items()]
    report.table("acceptance", heads, rows)
    out = total.figures() | {"mismatches": total.mismatches, "prompts": len(prompts), "tokens": total.tokens}
    for name, tally in tallies.items():
        out |= tally.figures(f"_{name}")
    out |= calibration.judge(verdicts, g.runner.block)
    return out | {"max_tokens": s.max_tokens, "temperature": e.temperature}
