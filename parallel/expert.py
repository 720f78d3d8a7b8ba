"""Expert parallelism: rows to the ranks that hold their experts, and results back (DESIGN: dispatch=allgather).

N rows of each rank, the same on all (the agreed bucket); k experts a row; n ranks; D model dim. Everything is static in
shape, so both calls sit inside a compiled step. Every rank gets all rows, runs the experts it holds, and the reduce-
scatter returns one row for each (row, chosen expert), which is non-zero on one rank only: exact whatever n is. Over an
axis of size 1 both are the identity.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from parallel.mesh import Axis


@dataclass(frozen=True)
class Placement:
    """Where each expert of a layer lives: P physical slots over all ranks, P / n on each, rank by rank.

    Written in place, between two steps, in the same step on all ranks.
    """

    replicas: Tensor  # [E + 1, R] physical slots of an expert, repeated to fill; row E is `no expert`: slot P
    counts: Tensor  # [E + 1] how many of them differ


register_dataclass(Placement)


def even(experts: int, axis: Axis, device: torch.device | str = "cpu") -> Placement:
    """Expert e in slot e: each rank holds as many, in order. Raises ValueError if they do not divide."""
    if experts % axis.size:
        raise ValueError(f"{experts} experts do not divide over axis {axis.name!r} of size {axis.size}")
    slots = torch.arange(experts + 1, device=device)
    return Placement(slots.unsqueeze(1), torch.ones_like(slots))


def physical(place: Placement, ids: Tensor, positions: Tensor) -> Tensor:
    """Physical slots [N, k] of expert ids [N, k]. Which replica depends on the row's position and the choice's number
    alone: not on the rank, nor on who shares the batch."""
    turn = positions.clamp(min=0).unsqueeze(-1) + torch.arange(ids.shape[1], device=ids.device)
    return place.replicas[ids, turn % place.counts[ids]]


def dispatch(axis: Axis, x: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All ranks' rows: x [n * N, D], slots [n * N, k], weights [n * N, k] fp32, from this rank's.

    One collective: ids and weights travel as bytes beside the row.
    """
    if axis.size == 1:
        return x, slots, weights
    raw = [t.contiguous().view(torch.uint8) for t in (x, slots.to(torch.int32), weights)]
    widths = [t.shape[1] for t in raw]
    every = gather(axis, torch.cat(raw, 1))
    parts = [t.contiguous() for t in every.split(widths, 1)]
    return parts[0].view(x.dtype), parts[1].view(torch.int32).to(slots.dtype), parts[2].view(weights.dtype)


def local(axis: Axis, numbers: Tensor, held: int) -> Tensor:
    """Numbers among the ``held`` experts or table rows of this rank; ``held`` where another has it, or nobody."""
    mine = numbers - axis.rank * held
    return torch.where((mine >= 0) & (mine < held), mine, held)


def combine(axis: Axis, y: Tensor) -> Tensor:
    """This rank's rows [N, ..] of results y [n * N, ..], each value of which one rank made and the others left zero."""
    if axis.size == 1:
        return y
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(y.contiguous(), "sum", axis.size, axis.group))


def gather(axis: Axis, x: Tensor) -> Tensor:
    """All ranks' rows [n * N, ..], rank by rank."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, axis.size, axis.group))
