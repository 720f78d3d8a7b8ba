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


def first_plan(experts: int, redundant: int, ranks: int) -> Tensor:
    """Expert [P] of each slot before any load is known: E / ranks a rank, in order, and the first of the next rank's in
    redundant slots. Raises ValueError if either does not divide, or would put an expert on a rank twice."""
    if experts % ranks or redundant % ranks:
        raise ValueError(f"{experts} experts and {redundant} redundant slots do not divide over {ranks} ranks")
    own, more = experts // ranks, redundant // ranks
    if own + more > experts:
        raise ValueError(f"{redundant} redundant slots are more than a replica of each of {experts} experts a rank")
    return ((torch.arange(ranks)[:, None] * own + torch.arange(own + more)) % experts).flatten()


def placement(plan: Tensor, experts: int, width: int) -> Placement:
    """What `physical` needs of a plan [P]: the expert of each slot, every expert in 1 .. ``width`` slots."""
    order, counts = torch.argsort(plan, stable=True), torch.bincount(plan, minlength=experts)
    turn = torch.arange(width, device=plan.device) % counts.unsqueeze(1)
    replicas = order[(counts.cumsum(0) - counts).unsqueeze(1) + turn]
    none = lambda like, value: like.new_full((1, *like.shape[1:]), value)  # noqa: E731
    return Placement(torch.cat((replicas, none(replicas, len(plan)))), torch.cat((counts, none(counts, 1))))


def spread(experts: int, axis: Axis, redundant: int = 0, device: torch.device | str = "cpu") -> Placement:
    """The placement of `first_plan`, with room for as many replicas of an expert as there can ever be."""
    plan = first_plan(experts, redundant, axis.size).to(device)
    return placement(plan, experts, min(axis.size, 1 + redundant))


def write(place: Placement, new: Placement) -> None:
    """Make ``place`` what ``new`` is, in place."""
    place.replicas.copy_(new.replicas)
    place.counts.copy_(new.counts)


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
    widths, message = pack(x, slots, weights)
    return unpack(gather(axis, message), widths, x, slots, weights)


def pack(x: Tensor, slots: Tensor, weights: Tensor) -> tuple[list[int], Tensor]:
    """A message of bytes for each row, and how many of them each part takes. Slots go as int32."""
    raw = [t.contiguous().view(torch.uint8) for t in (x, slots.to(torch.int32), weights)]
    return [t.shape[1] for t in raw], torch.cat(raw, 1)


def unpack(
    message: Tensor, widths: list[int], x: Tensor, slots: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, slots and weights that came as bytes, in the types of those given."""
    parts = [t.contiguous() for t in message.split(widths, 1)]
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
