"""What a layer does on other ranks by uneven all-to-all (`parallel/alltoall.py`). Splits are host integers, which no
graph holds: a graph that is traced calls each function here as one opaque op, and it runs in eager within.

N rows, k chosen experts, D model dim, M table columns, W row width. ``size``, ``rank``, ``group``: of the axis.
"""

import torch
from torch import Tensor

from kernels.engram import engram_gather
from kernels.moe import grouped_mlp
from parallel import alltoall
from parallel.mesh import Axis


@torch.library.custom_op("racklab::routed_mlp", mutates_args=())
def routed_mlp(
    x: Tensor, slots: Tensor, weights: Tensor, w1: Tensor, s1: Tensor | None, w3: Tensor, s3: Tensor | None,
    w2: Tensor, s2: Tensor | None, limit: float, quantise: bool, pad: int, backend: str,
    size: int, rank: int, group: str,
) -> Tensor:  # fmt: skip
    """`grouped_mlp` of all ranks' experts: slots [N, k] are physical, their weights lie where the slots do."""

    def run(rows: Tensor, mine: Tensor, share: Tensor) -> Tensor:
        return grouped_mlp(rows, mine, share, w1, s1, w3, s3, w2, s2, limit, quantise, pad, backend=backend)

    return alltoall.routed(Axis("ep", size, rank, group), w1.shape[0], x, slots, weights, run)


@routed_mlp.register_fake
def _routed_shape(
    x, slots, weights, w1, s1, w3, s3, w2, s2, limit, quantise, pad, backend, size, rank, group
):  # fmt: skip
    return x.new_empty(*slots.shape, x.shape[-1])


@torch.library.custom_op("racklab::fetched_rows", mutates_args=())
def fetched_rows(
    table: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype, held: int, backend: str,
    size: int, rank: int, group: str,
) -> Tensor:  # fmt: skip
    """`engram_gather` from a table of which each rank has ``held`` rows: ids [N, M] -> [N, M * W]."""

    def read(mine: Tensor) -> Tensor:
        return engram_gather(table, scale, mine.unsqueeze(1), dtype, backend=backend)

    return alltoall.fetched(Axis("ep", size, rank, group), held, ids.flatten(), read).view(ids.shape[0], -1)


@fetched_rows.register_fake
def _fetched_shape(table, scale, ids, dtype, held, backend, size, rank, group):
    return table.new_empty((ids.shape[0], ids.shape[1] * table.shape[1]), dtype=dtype)
