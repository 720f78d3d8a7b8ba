"""Process groups: this rank's seat among all ranks, and the axes of a plan over them.

Ranks come from torchrun's environment or are spawned by scripts; either way this file is told numbers, and reads no
environment. gloo moves host tensors, nccl those of a GPU.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.expert import Axis
from parallel.plan import Plan


@dataclass(frozen=True)
class Seat:
    """``store``: a file all ranks of one machine see, or tcp://HOST:PORT of rank 0."""

    rank: int = 0
    size: int = 1
    store: str = ""
    timeout_s: float = 120.0


ALONE = Seat()


def join(seat: Seat, device: str = "cpu") -> None:
    """Wait for all ranks, then return with the default group made. Raises what torch raises if one never comes."""
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    address = seat.store if "://" in seat.store else f"file://{seat.store}"
    dist.init_process_group(
        backend, init_method=address, rank=seat.rank, world_size=seat.size, timeout=timedelta(seconds=seat.timeout_s)
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def axis(plan: Plan, name: str, seat: Seat) -> Axis:
    """The axis called ``name`` at this seat: ranks r with the same r // size share a group. Every rank must call it."""
    size = dict(plan.axes).get(name, 1)
    if size == 1:
        return Axis(name)
    if size == seat.size:
        return Axis(name, size, seat.rank, dist.group.WORLD.group_name)
    groups = [dist.new_group(range(at, at + size)) for at in range(0, seat.size, size)]
    return Axis(name, size, seat.rank % size, groups[seat.rank // size].group_name)


def gather_rows(group: str, size: int):
    """The `gather` of serve/lockstep.py by collectives: row [width] int64 -> rows [size, width], equal on all ranks."""

    def gather(row):
        ops = torch.ops._c10d_functional
        rows = ops.wait_tensor(ops.all_gather_into_tensor(torch.from_numpy(row), size, group))
        return rows.view(size, -1).numpy()

    return gather
