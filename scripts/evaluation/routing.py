"""Which experts held-out text chooses: per layer and expert, and as a trace of a serving run (`routing.npz`, see
trace.py).

Prompts are prefilled and decoded with drafts by the plain loop, so that the trace has prefill, verify and draft steps
as they come. It is recorded from the reference bodies, whatever `kernels` says: those choose the same experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels import choose
from kernels.registry import recording
from model.dspark import Draft, DraftBatch
from model.pack import Span
from model.transformer import Model
from scripts import report
from scripts.evaluation import trace
from scripts.evaluation.given import Given, check_room, groups, passages
from scripts.evaluation.trace import Routing, Trace, balancedness
from scripts.progress import progress
from serve import offline
from serve.request import Sampling
from serve.runner import Runner

FILE = "routing.npz"


class Part:
    """Rows of one part of a trace, as they come."""

    def __init__(self, layers: int, k: int, experts: int):
        self.experts, self.ids = experts, [np.empty((0, layers, k), np.int16)]
        self.requests, self.positions = [np.empty(0, np.int32)], [np.empty(0, np.int32)]

    def add(self, log: Sequence[tuple[str, tuple, Any]], requests: np.ndarray, positions: np.ndarray) -> None:
        """A step's calls of `route` in layer order, each with at least as many rows as ``requests``."""
        chosen = [out[0][: len(requests)].cpu().numpy() for name, _, out in log if name == "route"]
        self.ids.append(np.stack(chosen, 1).astype(np.int16))
        self.requests.append(requests.astype(np.int32))
        self.positions.append(positions.astype(np.int32))

    def close(self) -> Trace:
        offsets = np.cumsum([len(ids) for ids in self.ids])
        parts = (self.ids, self.requests, self.positions)
        ids, requests, positions = (np.concatenate(p) for p in parts)
        return Trace(ids, offsets, requests, positions, self.experts)


class Watched:
    """A runner whose choices of experts are noted. ``first``: request of slot 1."""

    def __init__(self, model: Model, pages: int, slots: int, device: torch.device | str, log: list):
        plain = replace(model, rt=replace(model.rt, kernels=choose("reference")), jit=partial)
        self._runner, self._log, self.first, cfg = Runner(plain, pages, slots, device), log, 0, model.cfg
        noted = choose("reference", route="recorded")
        self._runner.model = replace(plain, rt=replace(plain.rt, kernels=noted))
        self.target = Part(cfg.num_hidden_layers, cfg.num_experts_per_tok, cfg.n_routed_experts)
        stages = cfg.num_nextn_predict_layers if model.params.mtp else 0
        self.drafter = Part(stages, cfg.dspark_num_experts_per_tok, cfg.dspark_n_routed_experts) if stages else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, spans: Sequence[Span], *rest: Any) -> tuple:
        self._log.clear()
        out = self._runner.step(spans, *rest)
        requests = np.concatenate([np.full(len(s.tokens), self.first + s.slot - 1) for s in spans])
        positions = np.concatenate([s.start + np.arange(len(s.tokens)) for s in spans])
        self.target.add(self._log, requests, positions)
        return out

    def draft(self, batch: DraftBatch) -> Draft:
        self._log.clear()
        out, block = self._runner.draft(batch), self._runner.block
        requests = np.repeat(self.first + batch.slots.cpu().numpy() - 1, block)
        positions = (batch.positions.cpu().numpy()[:, None] + np.arange(block)).ravel()
        self.drafter.add(self._log, requests, positions)
        return out


def record(g: Given, prompts: Sequence[np.ndarray]) -> Routing:
    """Serve the prompts by the plain loop and note every choice."""
    r, have = g.settings.routing, g.runner
    how = Sampling(r.max_tokens, seed=g.settings.seed)
    with recording(choose("reference").names()) as log, progress("routing", len(prompts), "prompts") as advance:
        watched = Watched(have.model, have.pages, have.slots, have.device, log)
        for group in groups(prompts, g.settings.evaluate.batch, advance):
            offline.generate(watched, group, [how] * len(group), speculate=watched.drafter is not None)
            watched.first += len(group)
    drafter = watched.drafter.close() if watched.drafter else None
    return Routing(np.array([len(p) for p in prompts]), watched.target.close(), drafter)


def run(g: Given) -> dict:
    """routing.npz, routing.csv (choices of each layer and expert), a plot, and keys ``balancedness_r{ranks}`` of the
    whole trace and ``step_balancedness_r{ranks}`` of its mean step, with ``drafter_`` in front for the drafter's."""
    r, cfg, batch = g.settings.routing, g.runner.model.cfg, g.settings.evaluate.batch
    for ranks in r.ranks:
        if cfg.n_routed_experts % ranks:
            raise ValueError(f"routing.ranks: {ranks} does not divide the model's {cfg.n_routed_experts} experts")
    tokens = r.prompt_tokens + r.max_tokens + g.runner.block
    check_room(g.runner, tokens, batch, "routing.prompt_tokens + routing.max_tokens")
    found = record(g, passages(g, r.prompts, r.prompt_tokens))
    path = report.run_folder() / FILE
    trace.save(path, found)
    parts = {"target": found.target} | ({"drafter": found.drafter} if found.drafter else {})
    show(parts)
    out, rows = {}, []
    for part, own in parts.items():
        steps, lead = own.step_counts(), "" if part == "target" else f"{part}_"
        for ranks in (n for n in r.ranks if own.experts % n == 0):
            whole, each = balancedness(steps.sum(0), ranks), balancedness(steps, ranks)
            rows.append((part, ranks, whole, each, 1 / ranks))
            out |= {f"{lead}balancedness_r{ranks}": whole, f"{lead}step_balancedness_r{ranks}": each}
        out |= {f"{lead}tokens": len(own.ids), f"{lead}steps": own.steps}
    heads = ("part", "ranks", "balancedness of the trace", "of a mean step", "worst possible")
    report.table("balancedness", heads, rows)
    return out | {"trace": str(path)}


def show(parts: dict[str, Trace]) -> None:
    """routing.csv and routing.png: the share of a layer's choices that each expert takes, over an even share."""
    rows = []
    with report.plot("routing", len(parts)) as axes:
        for ax, (part, own) in zip(axes, parts.items(), strict=True):
            counts = own.counts()
            rows += [(part, layer, expert, int(n)) for layer, row in enumerate(counts) for expert, n in enumerate(row)]
            image = ax.imshow(counts / counts.mean(1, keepdims=True), aspect="auto", cmap="viridis", vmin=0)
            ax.set(xlabel="expert", ylabel="layer", title=f"{part}: load over an even share", yticks=range(len(counts)))
            ax.figure.colorbar(image, ax=ax)
    report.write_csv(report.run_folder() / "routing.csv", ("part", "layer", "expert", "choices"), rows)
