"""The op contract: a declaration whose body is the `reference` backend, and the fast twins registered beside it.

    @op
    def shift(x: Tensor) -> Tensor: ...            # reference: plain torch, clear before fast
    @shift.backend("triton")
    def _(x): ...                                  # chosen by config: kernels.shift=triton

`compile` is the reference body under torch.compile; inside a graph that is being traced it is the body itself.
A body that torch.compile cannot trace (its shapes depend on data) is declared `opaque`: traced graphs call it
through torch.library.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

OPS: dict[str, "Op"] = {}

# Of torch.compile, here and in the runner. A value rounded to bf16 between two fused operations stays rounded, as the
# model's numerics say; without it Inductor keeps such values in fp32, and `qat` is another model. Reads stay where they
# are traced; else Inductor moves those of a pool behind a later write to it, and then copies the whole pool twice.
COMPILE_OPTIONS = {"emulate_precision_casts": True, "reorder_for_locality": False}


class Op:
    """One op and its backends. Call it as a function; ``backend=`` names which body runs."""

    def __init__(self, body: Callable, opaque: Callable | None = None, mutates: tuple[str, ...] = ()):
        self.name = body.__name__
        self.body = body
        self.__doc__ = body.__doc__
        self.impls: dict[str, Callable] = {"reference": body}
        if opaque is None:
            self.traced = body
            self.impls["compile"] = torch.compile(body, fullgraph=True, dynamic=True, options=COMPILE_OPTIONS)
        else:
            self.traced = torch.library.custom_op(f"racklab::{self.name}", body, mutates_args=mutates)
            self.traced.register_fake(opaque)
            self.impls["compile"] = self.traced
        self.examples: Callable[[], list[tuple]] = list

    def __call__(self, *args: Any, backend: str = "reference") -> Any:
        if torch.compiler.is_compiling() and backend in ("reference", "compile"):
            return self.traced(*args)
        return self.impls[backend](*args)

    def backend(self, name: str) -> Callable:
        """Register a body with the same contract under ``name``."""

        def register(body: Callable) -> Callable:
            self.impls[name] = body
            return body

        return register

    def cases(self, make: Callable[[], list[tuple]]) -> Callable:
        """Register small inputs (odd sizes, one row, padding): ``make() -> list of argument tuples``."""
        self.examples = make
        return make


def op(body: Callable | None = None, *, opaque: Callable | None = None, mutates: tuple[str, ...] = ()) -> Any:
    """Declare an op. ``opaque`` gives the result's shape (a fake) for bodies that cannot be traced."""

    def declare(fn: Callable) -> Op:
        if fn.__name__ in OPS:
            raise ValueError(f"op {fn.__name__!r} is declared twice")
        OPS[fn.__name__] = Op(fn, opaque, mutates)
        return OPS[fn.__name__]

    return declare(body) if body is not None else declare


@contextlib.contextmanager
def recording(backends: dict[str, str]) -> Iterator[list[tuple[str, tuple, Any]]]:
    """While open, backend ``recorded`` of every op runs the one named in ``backends`` and notes what went through.

    Yields the list of (op name, arguments, result), in the order of the calls.
    """
    log: list[tuple[str, tuple, Any]] = []

    def recorded(name: str) -> Callable:
        impl = OPS[name].impls[backends[name]]

        def run(*args: Any) -> Any:
            out = impl(*args)
            log.append((name, args, out))
            return out

        return run

    try:
        for name, each in OPS.items():
            each.impls["recorded"] = recorded(name)
        yield log
    finally:
        for each in OPS.values():
            each.impls.pop("recorded", None)
