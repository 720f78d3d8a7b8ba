"""Rounding as released inside training, gradients passed straight through (spec sections 2.2 to 2.5)."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import quant
from model import release, transformer, tree
from model.config import ModelConfig
from model.dense import Numerics
from model.tree import Spec
from scripts.training.export import STACKS


def through(rounded: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``rounded`` forward, the identity backward."""
    return lambda x: x + (rounded(x.detach()) - x.detach())


def straight_through() -> Numerics:
    """The fake quantisers of activations and caches."""
    return Numerics(through(quant.fake_fp8), through(quant.fake_nvfp4), through(quant.fake_mxfp4))


def weights(cfg: ModelConfig) -> Callable[[str, Tensor], Tensor]:
    """A function (name, parameter) -> the parameter as a checkpoint gives it back."""
    specs = dict(tree.walk(transformer.specs(cfg)))
    by_name = {e.name: release.one(specs[e.path]) for e in release.schema(cfg).values() if e.part == "weight"}

    def rounded(name: str, value: Tensor) -> Tensor:
        stem, _, last = name.rpartition(".")
        stacked = last in STACKS and stem.endswith(".experts")
        spec = by_name[f"{stem}.0.{last}.weight" if stacked else name]
        return through(lambda v: stored(spec, v.flatten(0, -2)).view_as(v) if v.dim() > 1 else stored(spec, v))(value)

    return rounded


def stored(spec: Spec, value: Tensor) -> Tensor:
    """What is left of fp32 values after writing and reading. Rows of stacked experts may be one matrix: FP4 groups lie
    within a row."""
    return release.decode(spec, *release.encode(spec, value), torch.float32)
