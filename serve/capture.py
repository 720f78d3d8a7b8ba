"""Decode steps recorded once for each size and replayed: on a GPU a small step is bound by its launches.

A step without prefill, padded to a bucket of rows, has shapes that do not depend on who takes part. Its inputs are
copied to buffers that stay where they are, and the recorded graph runs on those. N rows, B sequences, P pages a table,
M wanted rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from model import moe, transformer
from model.batch import Batch
from model.cache import Cache
from model.pack import ROW_MULTIPLE, Rows, padded
from model.transformer import Model

WARM_RUNS = 3  # before a graph is recorded: lazy initialisation and compilation must be over


class Recorder(Protocol):
    """A device that can record what it is made to do."""

    def record(self, run: Callable[..., Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """``run(*leaves)`` recorded: its result, and what runs it again on what ``leaves`` hold then, into the same
        result. A run reads nothing that changes but ``leaves``, writes only to them, and asks the device for nothing.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory: a result lasts until the next replay of any of them."""

    def __init__(self, device: torch.device):
        self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(self, run: Callable[..., Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
        here = torch.cuda.current_stream(self.side.device)
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            for _ in range(WARM_RUNS):
                run(*leaves)
        here.wait_stream(self.side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.side):
            out = run(*leaves)
        return out, graph.replay


def recorder(device: torch.device | str) -> Recorder:
    """That of a device. Raises ValueError where it has none."""
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"serve.capture.buckets records graphs of a GPU, and device={device}: leave it null")
    return CudaGraphs(device)


@dataclass(frozen=True)
class Recorded:
    inputs: list[Tensor]  # leaves of a batch, then the wanted rows
    logits: Tensor  # [N, V]
    replay: Callable[[], None]


class Capture:
    """Recorded steps of ``model`` on ``cache``: one for each bucket, width of page tables and height of tiles that has
    come up. ``most``: rows of one sequence at most."""

    def __init__(self, model: Model, cache: Cache, buckets: Sequence[int], most: int, recorder: Recorder):
        for rows in buckets:
            check(model, rows)
        least = model.rt.least_rows
        self.model, self.cache, self.most, self.recorder = model, cache, most, recorder
        self.buckets = sorted({padded(max(rows, least), ROW_MULTIPLE) for rows in buckets})
        self.recorded: dict[tuple[int, ...], Recorded] = {}

    def bucket(self, rows: Rows) -> int:
        """Rows to pad the step to; 0: it runs as it is."""
        if not len(rows.counts) or rows.counts.max() > self.most:
            return 0
        return next((b for b in self.buckets if b >= len(rows.tokens)), 0)

    def run(self, batch: Batch, wanted: np.ndarray) -> Tensor:
        """Logits [M, V] of the ``wanted`` rows [M] of a batch of a bucket's size, until the next call."""
        key = (*batch.tiles.shape, *batch.page_tables.shape)
        if key not in self.recorded:
            self.recorded[key] = self._record(batch)
        one = self.recorded[key]
        rows = torch.from_numpy(np.pad(wanted, (0, len(one.inputs[-1]) - len(wanted))))
        for buffer, value in zip(one.inputs, (*tree_leaves(batch), rows), strict=True):
            buffer.copy_(value)
        one.replay()
        return one.logits[: len(wanted)]

    def _record(self, like: Batch) -> Recorded:
        """The step of padding alone, which writes scratch memory only."""
        inputs = [*tree_leaves(nothing(like)), torch.zeros_like(like.tokens)]
        count = len(inputs)

        def run(*leaves: Tensor) -> Tensor:
            batch, cache = Batch(*leaves[: count - 1]), Cache(*leaves[count:])
            return transformer.forward(self.model, cache, batch, leaves[count - 1])[0]

        logits, replay = self.recorder.record(run, (*inputs, *tree_leaves(self.cache)))
        return Recorded(inputs, logits, replay)


def nothing(like: Batch) -> Batch:
    """A batch of the same sizes in which every row is padding."""
    zeros = {name: torch.zeros_like(leaf) for name, leaf in vars(like).items()}
    last = (like.tiles.shape[0] - 1) * like.tiles.shape[1]
    zeros |= {"positions": zeros["positions"] - 1, "tiles": zeros["tiles"] - 1, "tile_of": zeros["tile_of"] + last}
    return Batch(**zeros)


def check(model: Model, rows: int) -> None:
    """Raise ValueError where a step of so many rows cannot be recorded."""
    if model.rt.ep.size > 1:
        raise ValueError(f"serve.capture.buckets needs parallel=single, the plan has {model.rt.ep.size} ranks")
    size = padded(max(rows, model.rt.least_rows), ROW_MULTIPLE)
    for layer in model.params.layers:
        body = moe.fitted(model.rt, layer.block.ffn, size).kernels.grouped_mlp
        if body != "dense":
            raise ValueError(
                f"serve.capture.buckets: a step of {rows} rows goes through experts by grouped_mlp={body}, which asks "
                f"the device for numbers and cannot be recorded: take buckets of at most {moe.DENSE_ROWS} rows with "
                "kernels.grouped_mlp=compile, or kernels.grouped_mlp=dense (all experts on all rows)"
            )
