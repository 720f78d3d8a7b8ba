"""A process for each rank of a bench: started together, heard in the order of ranks, killed at the end.

Imports nothing of ours: who forks decides what its ranks share.
"""

from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

LIMIT_S = 600  # from one rank that tells to the next


def each_rank(size: int, fn: Callable, args: Sequence, how: str = "spawn") -> list[Any]:
    """What ``fn(rank, tell, *args)`` tells, once, in the process of each of ``size`` ranks; a rank that has told may
    die as it likes. ``how``: spawn or fork.

    Raises ValueError naming a rank and what it raised, or that it died without a word.
    """
    context = get_context(how)
    made = [_start(context, fn, rank, args) for rank in range(size)]
    told: dict[int, Any] = {}
    try:
        while len(told) < size:
            left = [rank for rank in range(size) if rank not in told]
            objects = [x for rank in left for x in (made[rank][0].sentinel, made[rank][1])]
            if not wait(objects, timeout=LIMIT_S):
                raise ValueError(f"ranks {left} told nothing within {LIMIT_S} s; no figures")
            for rank in left:
                if (answer := _heard(rank, *made[rank])) is not None:
                    told[rank] = answer[0]
    finally:
        for process, pipe in made:
            process.join(5 if len(told) == size else 0)
            process.kill()
            pipe.close()
    return [told[rank] for rank in range(size)]


def _start(context: BaseContext, fn: Callable, rank: int, args: Sequence) -> tuple[BaseProcess, Connection]:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(theirs, fn, rank, args), daemon=True)
    process.start()
    theirs.close()  # so that its end is seen
    return process, ours


def _main(pipe: Connection, fn: Callable, rank: int, args: Sequence) -> None:
    try:
        fn(rank, lambda told: pipe.send((told, "")), *args)
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))


def _heard(rank: int, process: BaseProcess, pipe: Connection) -> tuple[Any] | None:
    """What a rank told, None where it has yet to."""
    gone = not process.is_alive()  # before the pipe is looked at: what a rank told may be read after its death
    try:
        if not pipe.poll():
            if not gone:
                return None
            raise EOFError
        told, wrong = pipe.recv()
    except EOFError:
        process.join(5)
        raise ValueError(f"rank {rank} died without a word, exit code {process.exitcode}; no figures") from None
    if wrong:
        raise ValueError(f"rank {rank}: {wrong}; no figures")
    return (told,)
