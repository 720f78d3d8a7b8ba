"""How far a config's predictions are from this run's own, on held-out text: KL in nats and top-1 agreement.

Each prompt is read, then the tokens after it are given one after the other (teacher forcing), so that both sides
predict the same positions. Sides are ways to compute the same thing, which differ in how the prompt is read:

    self                  nothing differs: must be 0
    decoder_replay        layers after the last KV source see the prompt's last window only (docs/model.md 13.2)
    layer20_replay        the last KV source too, with whole windows (13.3): the same as decoder_replay
    source_replay         the last KV source too, its own window cut as well (13.3, second form)
    hit_replay            the first `agreement.hit` tokens are cached; the window before it is replayed (13.4)
    last_window           the model is given nothing but the prompt's last window: a yardstick, not a config
or in the values of the config: fp32, qat, plain, packed (cache), dense, packed_weights, reference, compile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels import choose
from scripts import report
from scripts.build import build_runner
from scripts.evaluation.given import Given, check_room, forced, pages_of, passages
from scripts.evaluation.settings import Agreement
from scripts.laid import Laid
from scripts.progress import progress
from serve.runner import Runner

CHANGES = {  # of the settings
    "fp32": {"numerics": "fp32", "cache": "plain"},
    "qat": {"numerics": "qat"},
    "plain": {"cache": "plain"},
    "packed": {"cache": "packed"},
    "dense": {"weights": "dense"},
    "packed_weights": {"weights": "packed"},
    "reference": {"kernels": choose("reference")},
    "compile": {"kernels": choose("compile")},
}


# --- ways to read a prompt: each gives logits [tail, V] that predict the last ``tail`` tokens of a sequence ---


def cold(runner: Runner, sequence: np.ndarray, a: Agreement) -> Tensor:
    """Everything is computed, in chunks."""
    return forced(runner, [sequence], a.tail)[0]


def trimmed(runner: Runner, sequence: np.ndarray, a: Agreement, later: int, whole_windows: bool = False) -> Tensor:
    """Layers from ``later`` after the last KV source on run on the prompt's last window of rows only."""
    laid, prompt = alone(runner, sequence), sequence[: a.prompt]
    trim, last = laid.trim([prompt], runner.model.cfg.last_source + later, whole_windows)
    logits, _ = runner.step([laid.span(0, prompt, 0)], last, trim)
    return torch.cat((logits, tail(laid, sequence, a)))


def hit_replay(runner: Runner, sequence: np.ndarray, a: Agreement) -> Tensor:
    """Another slot finds the first ``hit`` tokens' pages: it recomputes the window before the hit, whose rows see
    nothing older and write no global rows, and goes on. What its rings hold from before is never read."""
    laid = alone(runner, sequence)
    laid.prefill([sequence[: a.hit]], [a.hit - 1])
    first = max(0, a.hit - runner.model.cfg.sliding_window)
    remember(runner, 2, sequence, first)
    suffix = laid.span(0, sequence[first : a.prompt], first, slot=2, floor=first, write_from=a.hit)
    logits, _ = runner.step([suffix], torch.tensor([a.prompt - 1 - first], device=runner.device))
    return torch.cat((logits, tail(laid, sequence, a, slot=2, floor=first)))


def last_window(runner: Runner, sequence: np.ndarray, a: Agreement) -> Tensor:
    """The prompt is cut to its last window."""
    return forced(runner, [sequence[-(a.tail + min(a.prompt, runner.model.cfg.sliding_window)) :]], a.tail)[0]


READS: dict[str, Callable[[Runner, np.ndarray, Agreement], Tensor]] = {
    "self": cold,
    "decoder_replay": partial(trimmed, later=1),
    "layer20_replay": partial(trimmed, later=0, whole_windows=True),
    "source_replay": partial(trimmed, later=0),
    "hit_replay": hit_replay,
    "last_window": last_window,
}


def alone(runner: Runner, sequence: np.ndarray) -> Laid:
    """With room for the sequence, its pages the first ones."""
    return Laid(runner, pages_of(runner, len(sequence)))


def tail(laid: Laid, sequence: np.ndarray, a: Agreement, slot: int = 1, floor: int = 0) -> Tensor:
    """Logits [tail - 1, V] after each token behind the prompt but the last."""
    runner = laid.runner
    if a.tail == 1:
        return torch.empty(0, runner.model.cfg.vocab_size, device=runner.device)
    step = laid.span(0, sequence[a.prompt : a.prompt + a.tail - 1], a.prompt, slot=slot, floor=floor)
    return runner.step([step], torch.arange(a.tail - 1, device=runner.device))[0]


def remember(runner: Runner, slot: int, sequence: np.ndarray, before: int) -> None:
    """Give a slot the ids in front of position ``before``: Engram looks back at them, and no step of it saw them."""
    depth = runner.model.layout.token_depth
    positions = torch.arange(max(0, before - depth), before)
    ids = torch.from_numpy(sequence)[positions].to(runner.device)
    runner.cache.tokens[(slot * depth + positions % depth).to(runner.device)] = ids


# --- the comparison ---


@dataclass(frozen=True)
class Distance:
    """Of one side, over samples and positions: KL(this run || it) in nats [samples, tail], and whether top-1 agrees."""

    kl: np.ndarray
    top1: np.ndarray

    def figures(self) -> dict[str, float]:
        """Over all positions after the prompt, and at the prompt's last token alone (``last``)."""
        return {
            "kl": float(self.kl.mean()),
            "kl_p99": float(np.quantile(self.kl, 0.99)),
            "top1": float(self.top1.mean()),
            "kl_last": float(self.kl[:, 0].mean()),
            "top1_last": float(self.top1[:, 0].mean()),
        }


def distance(own: Sequence[Tensor], other: Sequence[Tensor]) -> Distance:
    """Compare logits [tail, V] of each sample; in fp64, so that equal logits are at 0."""
    kl, same = [], []
    for p, q in zip(own, other, strict=True):
        p, q = (torch.log_softmax(x.double(), -1) for x in (p, q))
        kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0).cpu().numpy())
        same.append((p.argmax(-1) == q.argmax(-1)).cpu().numpy())
    return Distance(np.stack(kl), np.stack(same))


def sides(g: Given) -> Iterator[tuple[str, Runner, Callable]]:
    """Each side to compare with: its name, its runner, its way to read a prompt. Runners are built one at a time."""
    for name in g.settings.agreement.against:
        if name in READS:
            yield name, g.runner, READS[name]
        else:
            yield name, build_runner(replace(g.settings, **CHANGES[name]))[0], cold


def check(g: Given) -> None:
    """Raise ValueError for a side that is unknown or cannot be, before anything runs."""
    a, size = g.settings.agreement, g.runner.model.layout.page_size
    for name in a.against:
        if name not in READS and name not in CHANGES:
            raise ValueError(f"agreement.against: unknown {name!r}; known: {', '.join((*READS, *CHANGES))}")
        replace(g.settings, **CHANGES.get(name, {}))
    if "hit_replay" in a.against and a.hit % size:
        raise ValueError(f"agreement.hit must be a multiple of serve.page_size {size}, got {a.hit}")
    check_room(g.runner, a.prompt + a.tail, 2 if "hit_replay" in a.against else 1, "agreement.prompt + agreement.tail")


def run(g: Given) -> dict:
    """One table; keys ``kl_{side}``, ``kl_p99_{side}``, ``top1_{side}``; with ``_last`` at the prompt's last token."""
    check(g)
    a = g.settings.agreement
    sequences = passages(g, a.samples, a.prompt + a.tail)
    found = {}
    with progress("agreement", (1 + len(a.against)) * a.samples, "prompts") as advance:

        def played(runner: Runner, read: Callable) -> Iterator[Tensor]:
            for sequence in sequences:
                yield read(runner, sequence, a)
                advance(1)

        own = list(played(g.runner, cold))
        for name, runner, read in sides(g):
            found[name] = distance(own, list(played(runner, read))).figures()
    names = list(next(iter(found.values())))
    report.table("agreement", ("against", *names), [(name, *f.values()) for name, f in found.items()])
    out = {f"{key}_{name}": value for name, figures in found.items() for key, value in figures.items()}
    return out | {"samples": a.samples, "prompt": a.prompt, "tail": a.tail, "hit": a.hit}
