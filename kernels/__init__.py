"""Ops on local tensors. `Kernels` is the choice of a backend for each op, settled at build and part of `rt`."""

from dataclasses import field, make_dataclass

from kernels import attention, engram, index, linear, mhc, moe, rows  # noqa: F401  (declare the ops)
from kernels.registry import OPS


def _names(self) -> dict[str, str]:
    return {name: getattr(self, name) for name in OPS}


Kernels = make_dataclass(
    "Kernels",
    [(name, str, field(default="reference")) for name in OPS],
    frozen=True,
    namespace={"names": _names, "__doc__": "Backend of each op, by name."},
)


def choose(default: str = "reference", **overrides: str) -> Kernels:
    """Backends by name. Raises ValueError for an unknown op or a backend that an op lacks, naming what is there."""
    unknown = sorted(set(overrides) - set(OPS))
    if unknown:
        raise ValueError(f"unknown op {unknown[0]!r}; ops: {', '.join(sorted(OPS))}")
    there = sorted(set.intersection(*(set(each.impls) for each in OPS.values())))  # of every op
    if default not in there:
        raise ValueError(f"kernels.default={default!r} is not available; backends: {', '.join(there)}")
    chosen = {name: overrides.get(name, default) for name in OPS}
    for name, backend in chosen.items():
        have = OPS[name].impls
        if backend not in have:
            raise ValueError(f"kernels.{name}={backend!r} is not available; {name} has: {', '.join(sorted(have))}")
    return Kernels(**chosen)
