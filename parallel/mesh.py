"""Process groups: this rank's seat among all ranks, and the axes of a plan over them.

Ranks come from torchrun's environment or are spawned by scripts; either way this file is told numbers, and reads no
environment. gloo moves host tensors, nccl those of a GPU.
"""

from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from parallel.agree.gloo import Gloo
from parallel.agree.node import Recursive
from parallel.agree.port import Agree
from parallel.plan import Plan


@dataclass(frozen=True)
class Axis:
    """A mesh axis as compiled code may hold it: plain and hashable. ``group``: the process group's registered name."""

    name: str = "ep"
    size: int = 1
    rank: int = 0
    group: str = ""


@dataclass(frozen=True)
class Seat:
    """``store``: a file that all ranks of one machine see, or tcp://HOST:PORT/PREFIX of a store that is there.
    ``board``: the address of the node's shared board for agree=recursive. Among the engines of all groups: its
    ``number``, its ``name``, and ``post``, the folder of their inboxes, if they hand requests over."""

    rank: int = 0
    size: int = 1
    store: str = ""
    board: str = ""
    timeout_s: float = 120.0
    number: int = 0
    name: str = ""
    post: str = ""


ALONE = Seat()


def join(seat: Seat, device: str = "cpu") -> None:
    """Wait for all ranks, then return with the default group made. Raises what torch raises if one never comes."""
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=seat.timeout_s)
    if seat.store.startswith("tcp://"):
        at = urlsplit(seat.store)
        there = dist.TCPStore(at.hostname, at.port, is_master=False, timeout=timeout)
        how = {"store": dist.PrefixStore(at.path.strip("/"), there)}
    else:
        how = {"init_method": f"file://{seat.store}"}
    dist.init_process_group(backend, rank=seat.rank, world_size=seat.size, timeout=timeout, **how)


def store() -> dist.Store | None:
    """What all ranks can write to and read; None without a group."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


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


def agreement(backend: str, seat: Seat, ep: Axis, width: int) -> Agree:
    """Step agreement of the ranks of ``ep``, rows of ``width`` words: gloo, or recursive over the node's memory.

    Raises ValueError where recursive cannot serve: the axis is not the whole node's, or there is no board.
    """
    if backend == "recursive":
        if ep.size != seat.size or not seat.board:
            raise ValueError(
                "parallel.agree=recursive needs one node whose ranks all share the axis; use parallel.agree=gloo"
            )
        return Recursive(seat.board, seat.rank, seat.size, width, seat.timeout_s)
    group = own_group(seat, ep, timedelta(seconds=seat.timeout_s))
    return Gloo(group, store(), width)


def own_group(seat: Seat, ep: Axis, timeout: timedelta) -> dist.ProcessGroup:
    """A new gloo group of the ranks of ``ep``, shared with nothing else. Every rank must call it."""
    everybody = [range(at, at + ep.size) for at in range(0, seat.size, ep.size)]
    groups = [dist.new_group(ranks, backend="gloo", timeout=timeout) for ranks in everybody]
    return groups[seat.rank // ep.size]
