"""The phases of a training run, one after the other; each step is a function of (state, seed, step)."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from model.config import ModelConfig
from scripts.mapping import at_least
from scripts.training import backbone, corpus, drafter, init, optim, state
from scripts.training.backbone import Setup
from scripts.training.data import Rows, Tokens
from scripts.training.state import State
from serve.text import Text, train_bpe

PHASES = ("short", "index", "long", "drafter")


@dataclass(frozen=True)
class PhaseSettings:
    """``steps`` of ``rows`` sequences of ``length`` tokens."""

    steps: int
    length: int
    rows: int


@dataclass(frozen=True)
class Settings:
    """Values of conf/train.yaml. ``warmup`` in steps, ``decay`` the share of steps over which rates fall to zero."""

    seed: int
    short: PhaseSettings
    index: PhaseSettings
    long: PhaseSettings
    drafter: PhaseSettings
    anchors: int  # per sequence and drafter step
    warmup: int
    decay: float
    balance: tuple[float, float]  # expert-bias step, early and late
    balance_late: float  # share of steps after which the late one holds
    index_every: int  # in the long phase the indexers learn every so many steps
    save_every: int
    rates: optim.Rates

    def __post_init__(self):
        at_least(1, self, ("warmup", "index_every", "save_every", "anchors"))
        for name in PHASES:
            at_least(0, getattr(self, name), ("steps",), f"{name}.")
            at_least(1, getattr(self, name), ("length", "rows"), f"{name}.")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in 0..1, got {self.decay}")


@dataclass(frozen=True)
class Progress:
    """One finished step, for whoever shows it."""

    phase: str
    step: int
    steps: int
    metrics: dict[str, float]
    tokens: int
    seconds: float


def tokenise(text: Text, found: corpus.Corpus) -> Tokens:
    """Training documents as ids, each after BOS."""

    def ids(paths: tuple[str, ...]) -> tuple[np.ndarray, ...]:
        return tuple(np.array(text.prompt(found.read(p)), dtype=np.uint16) for p in paths)

    return Tokens(ids(found.code), ids(found.tests))


def train(
    settings: Settings,
    setup: Setup,
    tokens: Tokens,
    now: State,
    folder: Path,
    only: str | None = None,
    stop_after: int | None = None,
) -> Iterator[Progress]:
    """Run every phase, or one, that is not done yet, saving to ``folder``; yields after each step.

    ``stop_after`` ends early after that many steps of this call, state saved (a test's interruption).
    """
    count = 0
    for name, phase in phases(settings, setup, now).items():
        if only not in (None, name):
            continue
        plan: PhaseSettings = getattr(settings, name)
        rows = Rows(tokens, settings.seed, plan.length, plan.rows) if plan.steps > now.done.get(name, 0) else None
        while (step := now.done.get(name, 0)) < plan.steps:
            begun = time.perf_counter()
            metrics = phase(rows.batch(step), step)
            now.done[name] = step + 1
            count += 1
            last = step + 1 == plan.steps or count == stop_after
            if last or (step + 1) % settings.save_every == 0:
                state.save(now, folder)
            yield Progress(name, step, plan.steps, metrics, plan.length * plan.rows, time.perf_counter() - begun)
            if count == stop_after:
                return


def phases(settings: Settings, setup: Setup, now: State) -> dict[str, Callable[[Tensor, int], dict[str, float]]]:
    """Name -> function (batch, step) that takes one step on ``now`` and returns what it measured."""
    params, total = now.params, settings.short.steps + settings.long.steps
    index_steps = settings.index.steps + settings.long.steps // settings.index_every + 1

    def balance_rate(share: float) -> float:
        return settings.balance[share > settings.balance_late]

    def learn(group: str, grads: dict[str, Tensor], step: int, steps: int) -> None:
        held = now.moments.setdefault(group, optim.start(params, grads))
        optim.update(
            params, grads, held, step, backbone.schedule(step, steps, settings.warmup, settings.decay), settings.rates
        )

    def language(batch: Tensor, step: int, select: bool, with_index: bool) -> dict[str, float]:
        metrics, grads, loads = backbone.step_backbone(setup, params, batch, select, with_index)
        index = {n: grads.pop(n) for n in backbone.index_names(params) if n in grads}
        learn("backbone", grads, step, total)
        if index:
            seen = settings.index.steps + (step - settings.short.steps) // settings.index_every
            learn("index", index, seen, index_steps)
        backbone.balance(params, loads, balance_rate(step / total))
        metrics["imbalance"] = sum((x.max() / x.float().mean()).item() for x in loads.values()) / len(loads)
        return metrics

    def short(batch: Tensor, step: int) -> dict[str, float]:
        return language(batch, step, False, False)

    def index(batch: Tensor, step: int) -> dict[str, float]:
        metrics, grads = backbone.step_index(setup, params, batch)
        learn("index", grads, step, index_steps)
        return metrics

    def long(batch: Tensor, step: int) -> dict[str, float]:
        return language(batch, settings.short.steps + step, True, step % settings.index_every == 0)

    def draft(batch: Tensor, step: int) -> dict[str, float]:
        key = (settings.seed, step)
        metrics, grads, loads = drafter.step_drafter(setup, params, batch, settings.anchors, key)
        learn("drafter", grads, step, settings.drafter.steps)
        backbone.balance(params, loads, balance_rate(step / settings.drafter.steps), "mtp")
        return metrics

    return {"short": short, "index": index, "long": long, "drafter": draft}


def make_tokenizer(found: corpus.Corpus, vocab_size: int) -> Text:
    """A tokenizer of the training files' ordinary code."""
    return train_bpe((found.read(p) for p in found.code), vocab_size)


def fresh(cfg: ModelConfig, seed: int) -> State:
    return State(init.initial(cfg, seed))


def log_line(p: Progress) -> str:
    figures = {k: round(v, 4) for k, v in p.metrics.items()}
    return json.dumps({"phase": p.phase, "step": p.step, "tok_per_s": round(p.tokens / p.seconds), **figures})
