"""Does the model use what stands far back? Two kinds of repetition in held-out text, by length and depth.

needle: a line `self.NAME = VALUE` of random letters, and at the end the same `self.NAME =`; VALUE is scored.
copy: a stretch of other held-out text, and at the end the same stretch; all but its first few tokens are scored.

Beside each, the control: the same prompt whose first copy is another random line or stretch. The gain, in nats a token,
is what the first copy was worth; a model that retrieves has an accuracy near 1, one that does not has a gain near 0.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from scripts import report
from scripts.evaluation.given import Given, check_room, forced, groups
from scripts.progress import progress

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COPY_TOKENS, CUE_TOKENS = 32, 4  # of a copied stretch, and those at its start that are not scored
CONTROL = None  # in place of a depth


@dataclass(frozen=True)
class Task:
    """What is repeated: ``planted`` is the first copy, ``other`` the control's, of ``again`` the last ``scored``."""

    planted: np.ndarray
    other: np.ndarray
    again: np.ndarray
    scored: int


@dataclass(frozen=True)
class Prompt:
    """A sequence whose last ``scored`` tokens are judged; ``depth`` None is the control."""

    task: str
    length: int
    depth: float | None
    sequence: np.ndarray
    scored: int


def needle(g: Given, rng: np.random.Generator) -> Task:
    """A line of random names; the value is scored."""
    word = lambda: "".join(rng.choice(list(LETTERS), g.settings.needle.letters))  # noqa: E731
    encode = lambda string: np.array(g.text.encode(string), np.int64)  # noqa: E731
    cue, value = f"\n    self.{word()} =", f" {word()}"
    again = np.concatenate((encode(cue), encode(value)))
    return Task(again, encode(f"\n    self.{word()} = {word()}"), again, len(encode(value)))


def copy(g: Given, rng: np.random.Generator) -> Task:
    """Two stretches of held-out text that begin with a line."""
    begins = g.lines[g.lines + COPY_TOKENS <= len(g.ids)]
    one, other = (g.ids[b : b + COPY_TOKENS] for b in rng.choice(begins, 2))
    return Task(one, other, one, COPY_TOKENS - CUE_TOKENS)


TASKS = {"needle": needle, "copy": copy}


def prompts(g: Given, length: int, sample: int) -> list[Prompt]:
    """One sample of both tasks: a prompt for each depth, and the control, whose planted line is at the first depth.

    Each has ``length`` tokens in front of the repetition.
    """
    n, out = g.settings.needle, []
    for number, (name, make) in enumerate(TASKS.items()):
        rng = np.random.default_rng((g.settings.seed, number, length, sample))
        task = make(g, rng)
        room = length - 1 - max(len(task.planted), len(task.other))
        if room < 1 or len(g.ids) < length:
            raise ValueError(
                f"needle.lengths: {length} tokens are too few for a planted line, or too many for the text"
            )
        begin = int(rng.integers(len(g.ids) - room + 1))
        hay = g.ids[begin : begin + room]
        inside = g.lines[np.searchsorted(g.lines, begin) : np.searchsorted(g.lines, begin + room)] - begin
        breaks = np.array([0, *inside, room])  # where a line may be planted
        for depth in (*n.depths, CONTROL):
            at = breaks[np.abs(breaks - (n.depths[0] if depth is CONTROL else depth) * room).argmin()]
            planted = task.other if depth is CONTROL else task.planted
            parts = ([g.text.bos_id], hay[:at], planted, hay[at:], task.again)
            out.append(Prompt(name, length, depth, np.concatenate(parts), task.scored))
    return out


def judge(g: Given, group: list[Prompt]) -> list[tuple[float, float]]:
    """Nats a scored token, and the share of them that the model ranks first, of each prompt."""
    most = max(p.scored for p in group)
    out = []
    for p, logits in zip(group, forced(g.runner, [p.sequence for p in group], most), strict=True):
        target = torch.from_numpy(p.sequence[-p.scored :]).to(logits.device)
        logits = logits[-p.scored :]
        nats = -torch.log_softmax(logits, -1).gather(-1, target.unsqueeze(-1)).double().mean()
        out.append((float(nats), float((logits.argmax(-1) == target).double().mean())))
    return out


def run(g: Given) -> dict:
    """A table and a plot by length; keys ``needle_gain_{length}``, ``copy_accuracy_{length}`` and so on."""
    n, batch = g.settings.needle, g.settings.evaluate.batch
    check_room(g.runner, max(n.lengths) + 2 * COPY_TOKENS + 4 * n.letters, batch, f"needle.lengths={max(n.lengths)}")
    found: dict[tuple[str, int, float | None], list] = defaultdict(list)
    with progress(
        "needle and copy", len(n.lengths) * n.samples * (len(n.depths) + 1) * len(TASKS), "prompts"
    ) as advance:
        for length in n.lengths:
            every = [p for i in range(n.samples) for p in prompts(g, length, i)]
            for group in groups(every, batch, advance):
                for p, scores in zip(group, judge(g, group), strict=True):
                    found[p.task, p.length, p.depth].append(scores)
    means = {key: np.mean(scores, 0) for key, scores in found.items()}
    show(means, n.depths)
    out = {}
    for task in TASKS:
        for length in n.lengths:
            nats, accuracy = np.mean([means[task, length, d] for d in n.depths], 0)
            control = means[task, length, CONTROL]
            out[f"{task}_gain_{length}"] = float(control[0] - nats)
            out[f"{task}_accuracy_{length}"] = float(accuracy)
            out[f"{task}_control_accuracy_{length}"] = float(control[1])
    return out | {"samples": n.samples}


def show(means: dict[tuple[str, int, float | None], np.ndarray], depths: tuple[float, ...]) -> None:
    """needle.csv and needle.png: gain and accuracy of each task, length and depth."""
    rows = []
    for (task, length, depth), (nats, accuracy) in means.items():
        if depth is not CONTROL:
            control = means[task, length, CONTROL]
            rows.append((task, length, depth, nats, control[0], control[0] - nats, accuracy, control[1]))
    rows = [tuple(float(v) if isinstance(v, np.floating) else v for v in row) for row in rows]
    heads = ("task", "length", "depth", "nats", "control nats", "gain", "accuracy", "control accuracy")
    report.table("needle", heads, rows)
    with report.plot("needle", len(TASKS)) as axes:
        for ax, task in zip(axes, TASKS, strict=True):
            for depth in depths:
                points = [(r[1], r[5]) for r in rows if r[0] == task and r[2] == depth]
                ax.plot(*zip(*points, strict=True), marker="o", label=f"depth {depth:g}")
            ax.axhline(0, color="grey", linewidth=0.8)
            lengths = sorted({r[1] for r in rows})
            ax.set(
                xscale="log",
                xticks=lengths,
                xticklabels=lengths,
                xlabel="prompt tokens",
                ylabel="gain, nats a token",
                title=task,
            )
            ax.minorticks_off()
            ax.legend()
