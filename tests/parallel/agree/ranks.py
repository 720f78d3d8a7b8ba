"""What the processes of the port tests run; no pytest in them."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

from parallel.agree.node import Recursive
from parallel.agree.port import Missing, OutOfStep


def start(target: Callable, size: int, *args) -> tuple[list[BaseProcess], Callable]:
    """``target(rank, size, tell, *args)`` in a process for each rank, and a function that gives what they told by
    rank."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "tests.parallel.agree.ranks"])
    heard, told = context.Pipe(duplex=False)
    ranks = [context.Process(target=target, args=(r, size, told.send, *args), daemon=True) for r in range(size)]
    for rank in ranks:
        rank.start()

    def gather(count: int) -> dict:
        out = {}
        while len(out) < count:
            assert heard.poll(60), f"heard only {out}"
            out.update([heard.recv()])
        return out

    return ranks, gather


def sums(rank: int, size: int, tell: Callable, address: str, steps: int) -> None:
    """Steps with a late rank in each; tells rows of the last and whether all were right."""
    port = Recursive(address, rank, size, 3, timeout_s=60)
    right = True
    for step in range(steps):
        if step % size == rank:
            time.sleep(0.002)
        rows = port.gather([rank, step, rank * step - 5])
        right &= rows.tolist() == [[r, step, r * step - 5] for r in range(size)]
        right &= 0 <= port.transport_s < 60 and 0 <= port.skew_s < 60
    tell((rank, right))


def until_missing(rank: int, size: int, tell: Callable, address: str, fault: str, at: int, timeout_s: float) -> None:
    """All take steps; the ``at``-th does ``fault`` in step 3. Tells whom the others named."""
    port = Recursive(address, rank, size, 1, timeout_s)
    for step in range(1, 10):
        if rank == at and step == 3:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            port.close() if fault == "left" else time.sleep(60)
            return
        begin = time.monotonic()
        try:
            port.gather([step])
        except (Missing, OutOfStep) as error:
            tell((rank, (getattr(error, "ranks", ()), str(error), time.monotonic() - begin)))
            return


def by_gloo(rank: int, size: int, tell: Callable, file: str, absent: int | None) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from parallel.agree.gloo import Gloo

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(file, size)
    timeout = timedelta(seconds=2 if absent else 60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    port = Gloo(dist.group.WORLD, store, 2)
    right = all(port.gather([rank, step]).tolist() == [[r, step] for r in range(size)] for step in range(5))
    right &= port.transport_s >= 0 and port.skew_s >= 0
    if absent is None:
        tell((rank, (right, ())))
    elif rank == absent:
        time.sleep(5)
    else:
        try:
            port.gather([rank, 5])
        except Missing as error:
            tell((rank, (right, error.ranks)))
    os._exit(0)
