"""Rows of one layer to their experts and back: allgather against alltoall, bytes that ranks send and time, over gloo.

Experts only scale their rows, so that time is that of moving them. Even: all ranks have as many rows. One busy: the
first has them all: allgather pads every rank to the largest, alltoall moves what there is. Results must be equal.
"""

import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from model.config import ModelConfig
from parallel import alltoall, expert, mesh, plan
from parallel.mesh import Axis, Seat
from parallel.traffic import Traffic
from scripts import report
from scripts.benches.processes import each_rank
from scripts.build import Settings
from scripts.progress import progress

TURNS = 15


def rows_of(rank: int, ranks: int, rows: int, kind: str) -> int:
    return rows if kind == "even" else rows * ranks * (rank == 0)


def scaled(rows: Tensor, slots: Tensor, weights: Tensor, held: int) -> Tensor:
    """In place of experts: the row times its weight, zero where another rank has the expert."""
    return (rows.unsqueeze(1) * torch.where(slots < held, weights, 0).unsqueeze(-1)).to(rows.dtype)


def ways(ep: Axis, cfg: ModelConfig, rows: int, kind: str) -> dict[str, Callable[[], Tensor]]:
    """Either dispatch as a call without arguments, of seeded rows [N, D] and random routing."""
    draw, held, k = torch.Generator().manual_seed(ep.rank), cfg.n_routed_experts // ep.size, cfg.num_experts_per_tok
    own, most = rows_of(ep.rank, ep.size, rows, kind), rows_of(0, ep.size, rows, kind)
    x = torch.randn(most, cfg.hidden_size, generator=draw).bfloat16()
    slots = torch.rand(most, held * ep.size, generator=draw).topk(k).indices
    slots[own:] = held * ep.size
    weights = torch.rand(most, k, generator=draw)

    def run(rows: Tensor, mine: Tensor, share: Tensor) -> Tensor:
        return scaled(rows, mine, share, held)

    def allgather() -> Tensor:
        every, chosen, share = expert.dispatch(ep, x, slots, weights)
        return expert.combine(ep, run(every, expert.local(ep, chosen, held), share))[:own]

    def uneven() -> Tensor:
        return alltoall.routed(ep, held, x[:own], slots[:own], weights[:own], run)

    return {"allgather": allgather, "alltoall": uneven}


def measure(rank: int, tell: Callable, size: int, folder: str, cfg: ModelConfig, rows: int, kind: str) -> None:
    """The process of one rank: tells (bytes it sends, seconds of a turn) by either way. Raises ValueError where the two
    give different rows."""
    torch.set_num_threads(1)
    seat = Seat(rank, size, f"{folder}/ranks")
    try:
        mesh.join(seat)
        ep = mesh.axis(plan.parse({"ep": seat.size}, [["*", "replicate"]]), "ep", seat)
        made, told, results = ways(ep, cfg, rows, kind), {}, []
        for name, way in made.items():
            with Traffic(seat.rank) as moved:
                results.append(way())
            told[name] = (moved.bytes, [])
        for name, way in list(made.items()) * TURNS:
            torch.distributed.barrier()
            begin = time.perf_counter()
            way()
            told[name][1].append(time.perf_counter() - begin)
        if not torch.equal(*results):
            raise ValueError("results differ")
        tell({name: (sent, median(took)) for name, (sent, took) in told.items()})
    finally:
        mesh.leave()


def ranks(size: int, cfg: ModelConfig, rows: int, kind: str) -> list[dict]:
    """What each rank tells. Raises ValueError with what one could not do."""
    with tempfile.TemporaryDirectory(prefix="racklab-") as folder:
        return each_rank(size, measure, (size, folder, cfg, rows, kind))


def run(s: Settings) -> dict:
    """Table by ranks and where rows are; keys ``bytes_ratio_n{N}_{kind}`` and ``time_ratio_n{N}_{kind}``: allgather
    over alltoall."""
    table, out, sizes = [], {}, s.benches.dispatch
    with progress("bench=dispatch", 2 * len(sizes.ranks), "runs") as advance:
        for n in sizes.ranks:
            for kind in ("even", "one_busy"):
                told = ranks(n, s.model, sizes.rows, kind)
                sent = [sum(t[way][0] for t in told) for way in ("allgather", "alltoall")]
                took = [max(t[way][1] for t in told) * 1e3 for way in ("allgather", "alltoall")]
                table.append([n, kind, *sent, sent[0] / sent[1], *took, took[0] / took[1]])
                ratios = {"bytes_ratio": sent[0] / sent[1], "time_ratio": took[0] / took[1]}
                out |= {f"{name}_n{n}_{kind}": round(value, 3) for name, value in ratios.items()}
                advance(1)
    columns = (
        "ranks",
        "rows",
        "allgather bytes",
        "alltoall bytes",
        "ratio",
        "allgather ms",
        "alltoall ms",
        "time ratio",
    )
    report.table("dispatch", columns, table)
    return {**out, "rows": sizes.rows, "hidden_size": s.model.hidden_size}
