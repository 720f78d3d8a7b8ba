"""Which rank this process is, where torchrun started it."""

import os

from parallel.mesh import ALONE, Seat


def seat() -> Seat:
    """This process's seat by torchrun's environment; `ALONE` where torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ALONE
    return Seat(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def device(name: str, here: Seat) -> str:
    """``cuda`` is the GPU of its node that has the engine's number, or, under torchrun, the local rank's."""
    return f"cuda:{os.environ.get('LOCAL_RANK', here.number)}" if name == "cuda" else name


def check(engines: int) -> None:
    """Raise ValueError where torchrun started more or fewer ranks than there are engines in all groups."""
    given = seat()
    if given is not ALONE and engines != given.size:
        raise ValueError(
            f"torchrun started {given.size} ranks, and the plan has {engines} engines: start as many, or change "
            "parallel.axes.dp or serve.pools"
        )
