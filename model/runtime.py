"""What never changes during a run: numerics, storage form and kernel backends. Another value is another graph."""

from dataclasses import dataclass, field

import torch

from kernels import Kernels
from kernels.registry import COMPILE_OPTIONS
from parallel.mesh import Axis

NUMERICS = ("fp32", "qat")
STORAGE = ("plain", "packed")


@dataclass(frozen=True)
class Runtime:
    """``numerics``: fp32 (no fake quantisation) or qat (as released). ``cache``: plain (compute dtype) or packed.

    ``batch_invariant``: a row's result does not depend on the other rows of its step.
    """

    numerics: str = "qat"
    cache: str = "plain"
    batch_invariant: bool = True
    kernels: Kernels = field(default_factory=Kernels)  # backend of each op
    ep: Axis = field(default_factory=Axis)  # ranks that share the experts
    dispatch: str = "allgather"  # how rows get to them; alltoall: only where they are routed to

    def __post_init__(self):
        if self.numerics not in NUMERICS:
            raise ValueError(f"numerics must be one of {NUMERICS}, got {self.numerics!r}")
        if self.cache not in STORAGE:
            raise ValueError(f"cache must be one of {STORAGE}, got {self.cache!r}")
        if self.cache == "packed" and self.numerics != "qat":
            raise ValueError("cache=packed stores quantised values: it needs numerics=qat, got numerics=fp32")

    @property
    def qat(self) -> bool:
        return self.numerics == "qat"

    @property
    def dtype(self) -> torch.dtype:
        """Activation type."""
        return torch.bfloat16 if self.qat else torch.float32

    @property
    def compile_options(self) -> dict[str, bool]:
        """What the runner must hand to torch.compile."""
        return dict(COMPILE_OPTIONS)

    @property
    def least_rows(self) -> int:
        """Fewest rows of a step for which a row's bits do not depend on their number.

        Measured on CPUs: fp32 products of fewer rows sum in another order, and `qat` has some (mHC, gate, head).
        """
        return 16 if self.batch_invariant else 8

    @property
    def group_rows(self) -> int:
        """What an expert's rows are padded to, for the same reason; its bf16 products do not depend on their number."""
        return 1 if not self.batch_invariant else 4 if self.qat else 16
