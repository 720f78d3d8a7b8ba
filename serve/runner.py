"""The runner: packs a plan's spans, runs the compiled pieces of a layer, owns the cache.

With any op on `compile` each piece (model/block.py) becomes one graph for each kind of layer; lengths, batch
membership and positions are data, so a warmed-up runner never recompiles.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch.fx.experimental import _config as shape_config
from torch.utils._pytree import tree_leaves

from model import dspark, moe, transformer
from model.batch import Batch
from model.dspark import Draft, DraftBatch
from model.pack import ROW_MULTIPLE, Rows, Span, pack, pack_rows, padded
from model.transformer import Model, Trim
from serve.capture import Capture, Recorder
from serve.request import prompt_fault
from serve.tables import PageTable

PLAIN = ("reference", "dense")


def passed(guards: Sequence[Any]) -> list[bool]:
    """Which of Dynamo's guards to check at each call: those of what the call passes, and of torch's own state.

    The other four fifths are of globals, which are code, and of static arguments, which a function's key holds.
    """
    return [guard.name.startswith("args") or not guard.name for guard in guards]


def compiler(options: dict[str, bool]) -> Callable:
    """A `jit` for `Model`: one compiled function per (function, static arguments), each with a cache of its own."""
    cache: dict[tuple, Callable] = {}

    def jit(fn: Callable, *static: Any) -> Callable:
        key = (fn, *static)
        if key not in cache:

            def bound(*args: Any) -> Any:
                return fn(*static, *args)

            # Dynamo keeps its graphs by code object; a copy per key keeps one kind's graphs from counting for another.
            code = bound.__code__.replace(co_name=f"{fn.__module__}.{fn.__name__}".replace(".", "_"))
            copy = FunctionType(code, bound.__globals__, code.co_name, None, bound.__closure__)
            cache[key] = torch.compile(copy, fullgraph=True, options={**options, "guard_filter_fn": passed})
        return cache[key]

    return jit


def compiled(model: Model) -> bool:
    """Whether the layers are to be compiled: some op is on a body that is more than plain torch."""
    return any(backend not in PLAIN for backend in model.rt.kernels.names().values())


def trim_layer(model: Model, prefill: str) -> int:
    """The layer from which on prefill keeps each prompt's last window only (schedule/windows.py; spec section 13).

    Raises ValueError where a layer past it needs every row.
    """
    cfg = model.cfg
    if prefill == "full":
        return cfg.num_hidden_layers
    layer = cfg.last_source + (prefill == "decoder_replay")
    late = [i for i in cfg.engram_layer_ids if i > layer]
    if layer >= cfg.num_hidden_layers or late:
        why = f"Engram layers {late} need every token" if late else f"no layer follows source {cfg.last_source}"
        raise ValueError(f"serve.prefill={prefill} is not possible with this model: {why}; use serve.prefill=full")
    return layer


class Runner:
    """Runs steps of ``model`` on a cache of ``pages`` pages and ``slots`` sequences (number 0 of both is scratch)."""

    def __init__(self, model: Model, pages: int, slots: int, device: torch.device | str = "cpu", prefill: str = "full"):
        self.prefill, self.trim_layer = prefill, trim_layer(model, prefill)
        self.model = replace(model, jit=compiler(model.rt.compile_options)) if compiled(model) else model
        self.device = device
        self.pages, self.slots = pages, slots
        self.cache = model.layout.allocate(pages, slots, model.rt.dtype, device)
        self.table = PageTable(slots, -(-self.context // model.layout.page_size), device)
        self.capture: Capture | None = None
        if compiled(model):
            self.warm()

    @property
    def context(self) -> int:
        """Most tokens one sequence may have: what the model allows and the pages hold."""
        return min(self.model.cfg.max_position_embeddings, (self.pages - 1) * self.model.layout.page_size)

    @property
    def block(self) -> int:
        """Tokens the drafter proposes at a time; 0 without a drafter."""
        return self.model.cfg.dspark_block_size if self.model.params.mtp else 0

    def record(self, recorder: Recorder, buckets: Sequence[int]) -> None:
        """Replay decode steps that fit one of ``buckets`` from now on, each recorded when it first comes up. Raises
        ValueError where the model's steps cannot be."""
        self.capture = Capture(self.model, self.cache, buckets, 1 + self.block, recorder)

    def check(self, tokens: np.ndarray) -> None:
        """Raise ValueError for an empty prompt, one that leaves no room for an answer, or an id out of range."""
        fault = prompt_fault(tokens, self.context, self.model.cfg.vocab_size)
        if fault:
            raise ValueError(f"the prompt {fault}")

    def pack(self, spans: Sequence[Span]) -> Batch:
        """The batch of a step's spans, with as many rows as the numerics need."""
        return pack(spans, self.model.layout.page_size, self.model.rt.least_rows, self.device)

    @torch.no_grad()
    def step(self, spans: Sequence[Span], rows: Tensor, trim: Trim | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run one step; logits [M, V] of the wanted ``rows`` [M] (numbered in span order) and the drafter's taps."""
        batch = self.pack(spans)
        index = F.pad(rows, (0, self._drawn(len(rows)) - len(rows)))
        logits, taps = transformer.forward(self.model, self.cache, batch, index, trim)
        return logits[: len(rows)], taps

    @torch.no_grad()
    def run(
        self, rows: Rows, reach: int, wanted: np.ndarray, kept: np.ndarray | None = None, late: Rows | None = None,
        least: int = 0, late_least: int = 0,
    ) -> Tensor:  # fmt: skip
        """Logits [M, V] of the ``wanted`` rows [M] of sequences whose pages are in ``table``, none of them past
        ``reach`` tokens. With ``late`` the layers past the trim run only on the rows numbered ``kept``, which it
        describes, and ``wanted`` counts these. Padded to ``least`` rows."""
        width = padded(-(-reach // self.model.layout.page_size))
        bucket = self.capture.bucket(rows) if self.capture is not None and late is None else 0
        if bucket:
            return self.capture.run(self._pack(rows, width, bucket, bucket), wanted)
        batch, trim = self._pack(rows, width, least), None
        if late is not None:
            short = self._pack(late, width, late_least)
            index = F.pad(torch.from_numpy(kept), (0, len(short.tokens) - len(kept))).to(self.device)
            trim = Trim(self.trim_layer, index, short, self.prefill == "layer20_replay")
        count = len(wanted)
        index = np.zeros(self._drawn(count), np.int64)
        index[:count] = wanted
        logits, _ = transformer.forward(self.model, self.cache, batch, torch.from_numpy(index).to(self.device), trim)
        return logits[:count]

    def _drawn(self, wanted: int) -> int:
        """Rows that logits are made of, where ``wanted`` are asked for."""
        return padded(max(wanted, self.model.rt.least_rows), ROW_MULTIPLE)

    def _pack(self, rows: Rows, width: int, least: int, sequences: int = 0) -> Batch:
        tables = self.table.of(rows.slots, width, sequences)
        return pack_rows(rows, tables, self.model.layout.page_size, max(least, self.model.rt.least_rows))

    @torch.no_grad()
    def draft(self, batch: DraftBatch, least: int = 0) -> Draft:
        """Draft a block for each sequence; its context rows must be in the rings (they are after any `step`). Padded
        to ``least`` sequences."""
        count = len(batch.anchors)
        more = padded(max(least, count), 2) - count  # a graph serves two sequences or more
        if more:
            batch = DraftBatch(*(F.pad(t, (0, 0) * (t.dim() - 1) + (0, more)) for t in tree_leaves(batch)))
            batch.positions[count:] = -1
        return Draft(*(t[:count] for t in tree_leaves(self._draft(batch))))

    @torch.no_grad()
    def draft_nothing(self, sequences: int) -> None:
        """Padding in place of `draft`, for a rank whose peers draft."""
        self._draft(dummy_draft(self.model, padded(sequences, 2), self.device))

    def _draft(self, batch: DraftBatch) -> Draft:
        m, backbone = self.model, self.model.cfg.num_hidden_layers
        p, at, places = m.params, m.addresses[backbone:], m.places[backbone:]
        where = places, at, m.consts.window_freqs
        return dspark.draft(m.jit, m.cfg, m.rt, m.layout, p.mtp, *where, p.embed, p.head, batch, self.cache)

    @torch.no_grad()
    def warm(self) -> None:
        """Compile every graph on scratch memory, all lengths dynamic: those of few rows, and what many rows add."""
        model, jit = self.model, self.model.jit
        self.model = replace(model, jit=lambda fn, *static: functools.partial(_marked, jit(fn, *static)))
        with shape_config.patch(use_duck_shape=False):
            for rows in (16, moe.DENSE_ROWS + 16):
                wanted = torch.arange(11, device=self.device) % 8
                spans = [Span(np.zeros(n, np.int64), start=0, slot=0, pages=(0,) * 3) for n in (3, rows - 3)]
                transformer.forward(self.model, self.cache, mark(self.pack(spans)), mark(wanted))
                if self.block:
                    self._draft(mark(dummy_draft(model, 2 * -(-rows // (2 * self.block)), self.device)))
        self.model = model


def _marked(fn: Callable, *args: Any) -> Any:
    """Call ``fn`` and mark what it returns, so that the next graph sees its rows as dynamic too."""
    return mark(fn(*args))


def mark(value: Any) -> Any:
    """Mark the row dims of a batch, view, carry or tensor as dynamic; returns it."""
    for leaf in tree_leaves(value):
        if leaf is None or not leaf.dim():
            continue
        maybe_mark_dynamic(leaf, 0)
        if leaf.dtype is torch.bool and leaf.dim() == 2:  # candidate blocks: as wide as the page tables reach
            maybe_mark_dynamic(leaf, 1)
    if isinstance(value, Batch):
        maybe_mark_dynamic(value.page_tables, 1)
        maybe_mark_dynamic(value.tiles, 1)
    return value


def dummy_draft(model: Model, sequences: int, device: torch.device | str) -> DraftBatch:
    """Padding only: drafts nothing, writes nothing."""
    k, v = model.cfg.dspark_block_size, model.cfg.vocab_size
    zeros = torch.zeros(sequences, dtype=torch.int64, device=device)
    ones, noise = torch.ones(sequences, device=device), torch.zeros(sequences, k, v, device=device)
    return DraftBatch(zeros, zeros - 1, zeros.clone(), zeros.clone(), ones, noise)
