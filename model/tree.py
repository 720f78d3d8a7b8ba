"""Trees of tensors: parameter nodes, their specifications, and seeded initialisation.

A node is a frozen dataclass registered with torch's pytree, so a tree of them crosses torch.compile as
plain inputs. A `Spec` says what a leaf is before any memory exists; init, loading, sharding and memory
sums all walk the one tree of specs.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, dataclass_transform

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

FORMATS = ("fp8", "fp4", "bf16", "f32")


@dataclass_transform(frozen_default=True)
def node(cls: type) -> type:
    """Make `cls` a frozen dataclass whose fields are pytree children."""
    cls = dataclass(frozen=True)(cls)
    pytree.register_dataclass(cls)
    return cls


@node
class Quantized:
    """A linear weight: stored values and their scales, or, with ``scale`` None, values ready for use.

    fp8: weight [N, K] e4m3, scale [ceil(N/32), ceil(K/32)] e8m0. fp4: weight [.., N, K/2] int8 (even index in
    the low nibble), scale [.., N, K/32] e8m0. `scale` multiplies (spec section 11).
    """

    weight: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class Spec:
    """One parameter before it exists.

    ``shape`` is logical (unpacked); ``fmt`` the released storage format; ``bare`` names without ".weight"; ``promote``:
    BF16 in the file, fp32 in memory (spec section 11); ``stack``: dim 0 is an expert index, one released tensor each;
    ``rowwise``: an fp8 scale per 32 of each row, not per 32 x 32; ``init``: "normal" (std ``scale``), "zeros", "ones".
    """

    shape: tuple[int, ...]
    fmt: str = "bf16"
    bare: bool = False
    promote: bool = False
    stack: bool = False
    rowwise: bool = False
    init: str = "normal"
    scale: float = 1.0

    def __post_init__(self):
        if self.fmt not in FORMATS:
            raise ValueError(f"spec format must be one of {FORMATS}, got {self.fmt!r}")
        if self.fmt in ("fp8", "fp4") and self.shape[-1] % 32:
            raise ValueError(f"a quantised weight's last dim must be a multiple of 32, got {self.shape}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the scale tensor of a quantised format, None for the others."""
        if self.fmt not in ("fp8", "fp4"):
            return None
        *lead, n, k = self.shape
        rows = n if self.fmt == "fp4" or self.rowwise else -(-n // 32)
        return (*lead, rows, k // 32)


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves (specs, tensors, Quantized pairs) of a tree with their dotted paths, in field order."""
    if isinstance(tree, (Spec, Tensor, Quantized)):
        yield path, tree
    elif is_dataclass(tree):
        for f in fields(tree):
            yield from walk(getattr(tree, f.name), f"{path}.{f.name}" if path else f.name)
    elif isinstance(tree, tuple):
        for i, child in enumerate(tree):
            yield from walk(child, f"{path}.{i}" if path else str(i))
    elif tree is not None:
        raise TypeError(f"{path}: unexpected {type(tree).__name__} in a tree")


def build(fn: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """The same tree with ``fn(path, leaf)`` in place of each leaf."""
    if isinstance(tree, (Spec, Tensor, Quantized)):
        return fn(path, tree)
    if is_dataclass(tree):
        kids = {f.name: build(fn, getattr(tree, f.name), f"{path}.{f.name}" if path else f.name) for f in fields(tree)}
        return type(tree)(**kids)
    if isinstance(tree, tuple):
        return tuple(build(fn, c, f"{path}.{i}" if path else str(i)) for i, c in enumerate(tree))
    if tree is None:
        return None
    raise TypeError(f"{path}: unexpected {type(tree).__name__} in a tree")


def fold_in(key: int, path: str) -> int:
    """A 63-bit seed for the leaf at ``path``: the same on any plan, in any order."""
    digest = hashlib.blake2b(f"{key}/{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw(spec: Spec, key: int, path: str) -> Tensor:
    """fp32 values [*shape] of one leaf, a function of (key, path) alone."""
    if spec.init == "normal":
        gen = torch.Generator().manual_seed(fold_in(key, path))
        return torch.randn(spec.shape, generator=gen) * spec.scale
    return torch.ones(spec.shape) if spec.init == "ones" else torch.zeros(spec.shape)
