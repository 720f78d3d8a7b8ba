"""Runs a function on n ranks, each a process of its own joined by gloo, and collects what they return."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from model import transformer, tree
from model.config import ModelConfig
from model.transformer import Model
from model.tree import Quantized
from parallel.agree.gloo import Gloo
from parallel.expert import first_plan
from parallel.mesh import Axis
from serve.lockstep import WIDTH
from tests import small


def _main(rank: int, size: int, store: str, out: Any, fn: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        out.put((rank, fn(axis(rank, size), *args), None))
    except Exception:
        out.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def axis(rank: int, size: int) -> Axis:
    return Axis("ep", size, rank, dist.group.WORLD.group_name)


def run(size: int, fn: Callable, *args: Any, timeout: float = 300) -> list[Any]:
    """``fn(axis, *args)`` on each rank; its results by rank. Raises with the first rank's traceback."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_main, args=(r, size, f"{folder}/store", out, fn, args), daemon=True)
            for r in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            got = {}
            for _ in ranks:
                rank, result, error = out.get(timeout=timeout)
                assert error is None, f"rank {rank}: {error}"
                got[rank] = result
        finally:
            for process in ranks:
                process.join(5)
                process.kill()
    return [got[r] for r in range(size)]


def agree(more: int = 0) -> Gloo:
    """Step agreement of all ranks, with ``more`` words for a rider."""
    group = dist.new_group(backend="gloo")
    return Gloo(group, dist.distributed_c10d._get_default_store(), WIDTH + more)


def share(cfg: ModelConfig, ep: Axis, *how: Any, redundant: int = 0, dispatch: str = "allgather", **more: Any) -> Model:
    """The small model (tests/small.py) with this rank's share of experts and Engram rows, as conf/parallel/dep.yaml."""
    whole = small.model(cfg, *how, **more)

    def cut(path: str, leaf: Any) -> Any:
        if not (".experts." in path or path.endswith("engram.embed")):
            return leaf
        rows, held = -(-leaf.weight.shape[0] // ep.size), leaf.weight.shape[0]
        ids = torch.arange(ep.rank * rows, min((ep.rank + 1) * rows, held))
        if ".experts." in path:
            ids = first_plan(held, redundant, ep.size).view(ep.size, -1)[ep.rank]
        mine = lambda t: None if t is None else t.view(torch.uint8)[ids].view(t.dtype)  # noqa: E731
        return Quantized(mine(leaf.weight), mine(leaf.scale))

    params = tree.build(cut, whole.params)
    layout = replace(whole.layout, redundant=redundant)
    return transformer.assemble(cfg, replace(whole.rt, ep=ep, dispatch=dispatch), layout, params, whole.consts)
