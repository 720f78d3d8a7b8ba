"""Which rank this process is, where torchrun started it."""

import os
from collections.abc import Sequence

from parallel.mesh import ALONE, Seat


def seat() -> Seat:
    """This process's seat by torchrun's environment; `ALONE` where torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ALONE
    return Seat(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")


def device(name: str, here: Seat) -> str:
    """With several ranks ``cuda`` is each one's own GPU of its node."""
    return f"cuda:{os.environ.get('LOCAL_RANK', here.rank)}" if name == "cuda" and here.size > 1 else name


def check(groups: Sequence[int]) -> None:
    """Raise ValueError where torchrun started other ranks than those of the one group of engines there is to be."""
    given = seat()
    if given is not ALONE and list(groups) != [given.size]:
        raise ValueError(
            f"torchrun started {given.size} ranks, groups of engines have {list(groups)}: under torchrun there is one, "
            f"say parallel=dep parallel.axes.dp={given.size} without serve.pools"
        )
