"""The processes of `bench=agree`: `python -m scripts.benches.ranks SIZE SECONDS FILE` forks SIZE ranks, pinned
round-robin to the cores, prints one JSON line. It imports torch once and nothing of hydra.

Both backends exchange the same rows in the same processes and take turns. Each turn ends when rank 0's row says so.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch.distributed as dist

from parallel.agree import node
from parallel.agree.gloo import Gloo
from parallel.agree.port import Agree, Missing
from parallel.agree.recursive import rounds_of
from scripts.benches.processes import each_rank

WIDTH = 6
TURNS = 4
LEAST = 5  # steps of a turn, whatever they cost
FAULT_S = 20.0  # timeout of the exchange that a rank dies in


def turn(port: Agree, seconds: float, step: int) -> tuple[list[tuple[float, float, float]], int, bool]:
    """Steps until ``seconds`` are over: (transport, skew, whole call) of each; the next step; whether all rows were
    right on this rank."""
    times, right, end = [], True, time.monotonic() + seconds
    more = True
    while more:
        again = time.monotonic() < end or len(times) < LEAST
        begin = time.monotonic()
        rows = port.gather([step, port.rank, int(again), -step, step * port.rank, 7])
        times.append((port.transport_s, port.skew_s, time.monotonic() - begin))
        right &= rows[:, 1].tolist() == list(range(port.size)) and rows[:, 4].tolist() == (rows[:, 1] * step).tolist()
        right &= bool((rows[:, 0] == step).all() and (rows[:, 3] == -step).all())
        more = bool(rows[0, 2])
        step += 1
    return times, step, right


def rank(index: int, tell: Callable, size: int, seconds: float, file: str, address: str) -> None:
    """Both backends in turns; then the last rank is killed, and the others tell whom they miss."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    store = dist.FileStore(file, size)
    dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=timedelta(seconds=300))
    gloo = Gloo(dist.group.WORLD, store, WIDTH)
    recursive = node.Recursive(address, index, size, WIDTH, timeout_s=300)
    times: dict[str, list] = {"gloo": [], "recursive": []}
    step, right = 1, True
    for port in (gloo, recursive):
        _, step, _ = turn(port, 0, step)  # warm
    for _ in range(TURNS):
        for name, port in (("gloo", gloo), ("recursive", recursive)):
            own, step, good = turn(port, seconds / TURNS, step)
            times[name] += own
            right &= good
    recursive.timeout_s, named, begin = FAULT_S, (), time.monotonic()
    if index == size - 1:
        tell((times, right, None, 0.0))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            recursive.gather([0] * WIDTH)
    except Missing as error:
        named = error.ranks
    tell((times, right, named, time.monotonic() - begin))
    os._exit(0)


def main(size: int, seconds: float, file: str) -> dict:
    """Medians in us over all ranks and steps; whom the survivors named."""
    board = node.create(size, WIDTH)
    told = each_rank(size, rank, (size, seconds, file, board.address), "fork")
    out: dict = {"ranks": size, "rounds": rounds_of(size), "equal": all(right for _, right, _, _ in told)}
    for name in ("gloo", "recursive"):
        for i, what in enumerate(("", "_skew", "_call")):
            out[f"{name}{what}_us"] = 1e6 * median(t[i] for times, *_ in told for t in times[name])
        out[f"{name}_steps"] = len(told[0][0][name])
    out["named"] = sorted({named for _, _, named, _ in told[:-1]}) == [(size - 1,)]
    out["named_s"] = max(after_s for *_, after_s in told)
    return out


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])), flush=True)
