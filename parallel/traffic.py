"""What collectives take off a rank: bytes that it must send, counted from the tensors they are called with."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """While entered, counts this rank's functional collectives: ``bytes`` that go to other ranks at least, however the
    transport routes them, and ``calls`` by name. What one opaque op does inside is not seen."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank, self.bytes, self.calls = rank, 0, Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        space, _, name = func.name().partition("::")
        if space == "_c10d_functional" and name in SENT:
            self.bytes += SENT[name](self.rank, *args)
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def _to_all(rank: int, x: Any, size: int, group: str) -> int:
    return x.nbytes * (size - 1)


def _to_each(rank: int, x: Any, op: str, size: int, group: str) -> int:
    return x.nbytes // size * (size - 1)


def _uneven(rank: int, x: Any, takes: list[int], sends: list[int], group: str) -> int:
    return (len(x) - sends[rank]) * x[:1].nbytes if len(x) else 0


SENT = {
    "all_gather_into_tensor": _to_all,
    "reduce_scatter_tensor": _to_each,
    "all_to_all_single": _uneven,
}
