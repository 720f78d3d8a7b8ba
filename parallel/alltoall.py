"""Dispatch that moves only what is routed (`parallel.dispatch=alltoall`): uneven all-to-all, outside of any graph.

N rows of this rank, which may be 0 and differ between ranks; k experts a row; n ranks; D model dim. A row goes once to
each rank that holds an expert it chose, with its slots and weights; back comes one row for each (row, chosen expert).
The owner puts them where `expert.combine` would, so that the sum in slot order has the same bits. Splits are host
integers: each call waits for the device, and for the counts of all peers. Every rank of the axis must make each call.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from parallel import expert
from parallel.mesh import Axis


def routed(
    axis: Axis, held: int, x: Tensor, slots: Tensor, weights: Tensor, run: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """What the chosen experts make of x [N, D]: [N, k, D], zero where a slot is of no rank.

    slots [N, k] physical, ``held`` on each rank; weights [N, k] fp32. ``run`` puts rows [M, D] through the experts of
    this rank, given their local slots [M, k] (``held``: not ours) and weights: [M, k, D].
    """
    k = slots.shape[1]
    there = torch.arange(axis.size, device=x.device).view(-1, 1, 1) == slots // held  # [n, N, k]
    row = there.any(-1).nonzero()[:, 1]  # rank by rank
    sizes = torch.stack((there.any(-1).sum(1), there.sum((1, 2))), 1)  # rows, and choices of them
    theirs = swap(axis, sizes, [1] * axis.size, [1] * axis.size)
    (rows, choices), (their_rows, their_choices) = sizes.T.tolist(), theirs.T.tolist()
    widths, message = expert.pack(x[row], slots[row], weights[row])
    came, chosen, share = expert.unpack(swap(axis, message, rows, their_rows), widths, x, slots, weights)
    mine = expert.local(axis, chosen, held)
    made = run(came, mine, share)[mine < held]
    back = swap(axis, made, their_choices, choices)
    _, row, choice = there.nonzero(as_tuple=True)
    out = x.new_zeros(slots.numel(), x.shape[1])
    return out.index_copy_(0, row * k + choice, back).view(*slots.shape, x.shape[1])


def fetched(axis: Axis, held: int, ids: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows ids [A] of a table of which each rank has ``held``, the last perhaps fewer: [A, W], in the order of ids.

    ``read`` gives rows of this rank's part by local number.
    """
    owner = ids // held
    order = owner.argsort(stable=True)
    sizes = owner.bincount(minlength=axis.size)
    theirs = swap(axis, sizes, [1] * axis.size, [1] * axis.size)
    asks, answers = sizes.tolist(), theirs.tolist()
    wanted = swap(axis, ids[order], asks, answers)
    rows = swap(axis, read(wanted - axis.rank * held), answers, asks)
    return torch.empty_like(rows).index_copy_(0, order, rows)


def swap(axis: Axis, x: Tensor, sends: list[int], takes: list[int]) -> Tensor:
    """Rows from all ranks, rank by rank, ``takes`` of each, for our rows, of which ``sends`` go to each."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), takes, sends, axis.group))
