"""The released layout (spec section 11): tensor names, storage types and shapes, and values to and from them.

A leaf of `transformer.specs(cfg)` is one released weight, with a scale beside it if quantised; a stacked leaf (routed
experts) is one such pair per expert. Nothing here touches a file.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import quant
from model import transformer, tree
from model.config import ModelConfig
from model.tree import Spec

STORED = {"fp8": "F8_E4M3", "fp4": "I8", "bf16": "BF16", "f32": "F32"}  # Spec.fmt -> type in the file
TORCH = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
VISION = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
VISION_TENSORS = 266  # of the release; not described here
Cut = tuple[int, int, int]  # a rank's part of a logical shape: dim, start, stop


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint. ``expert`` is its index in a stacked leaf; ``part`` is weight, scale or ignored."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    path: str  # of the leaf in the parameter tree
    part: str = "weight"
    expert: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * TORCH[self.dtype].itemsize


def skipped(name: str) -> bool:
    """Released tensors that the text model does not use: vision, and the image tokens' gate biases."""
    return name.startswith(VISION) or name.endswith(".ffn.gate.bias_vl")


def weight_name(path: str, spec: Spec, expert: int | None = None) -> str:
    """Released name of a leaf, e.g. layers.3.block.ffn.experts.w1, expert 7 -> layers.3.ffn.experts.7.w1.weight."""
    name = path.replace(".block.", ".").replace(".hc_attn.", ".hc_attn_").replace(".hc_ffn.", ".hc_ffn_")
    if expert is not None:
        stem, last = name.rsplit(".", 1)
        name = f"{stem}.{expert}.{last}"
    return name if spec.bare else f"{name}.weight"


def entries(path: str, spec: Spec) -> Iterator[Entry]:
    """The released tensors of one leaf: per expert if stacked, a weight and then its scale if quantised."""
    shape, scale = spec.shape, spec.scale_shape
    if spec.stack:
        shape, scale = shape[1:], scale and scale[1:]
    stored = (*shape[:-1], shape[-1] // 2) if spec.fmt == "fp4" else shape
    for expert in range(spec.shape[0]) if spec.stack else (None,):
        name = weight_name(path, spec, expert)
        yield Entry(name, STORED[spec.fmt], stored, path, "weight", expert)
        if scale:
            yield Entry(f"{name.removesuffix('.weight')}.scale", "F8_E8M0", scale, path, "scale", expert)


def one(spec: Spec) -> Spec:
    """The spec of one expert of a stacked leaf; any other spec as it is."""
    return replace(spec, shape=spec.shape[1:], stack=False) if spec.stack else spec


def schema(cfg: ModelConfig) -> dict[str, Entry]:
    """Every tensor of a text checkpoint by name, in file order, the ignored ``ffn.gate.bias_vl`` included."""
    out = {}
    for path, spec in tree.walk(transformer.specs(cfg)):
        for entry in entries(path, spec):
            out[entry.name] = entry
        if path.endswith(".ffn.gate.bias"):
            name = f"{weight_name(path, spec)}_vl"
            out[name] = Entry(name, "F32", spec.shape, path, "ignored")
    return out


# --- values ---


def dense_dtype(spec: Spec, numerics: str) -> torch.dtype:
    """In memory, ready for use: fp32 where the file or the spec says so, else the compute type of ``numerics``."""
    return torch.float32 if numerics == "fp32" or spec.promote or spec.fmt == "f32" else torch.bfloat16


def held_bytes(spec: Spec, numerics: str, weights: str) -> int:
    """Bytes of a leaf in memory under ``weights`` (dense or packed), scales included."""
    if spec.scale_shape is None or (weights == "dense" and not spec.rowwise):
        return spec.numel * dense_dtype(spec, numerics).itemsize
    return spec.numel // (2 if spec.fmt == "fp4" else 1) + math.prod(spec.scale_shape)


def encode(spec: Spec, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """fp32 values of a leaf, or of one expert of it -> (weight, scale) as stored; rounds to the released format."""
    if spec.fmt == "fp4":
        return quant.quantise_fp4(values)
    if spec.fmt == "fp8":
        return (quant.quantise_fp8_rows if spec.rowwise else quant.quantise_fp8_block)(values)
    return values.to(torch.bfloat16 if spec.fmt == "bf16" else torch.float32), None


def decode(spec: Spec, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored (weight, scale) -> values in ``dtype``, exactly; ``scale`` None = already values."""
    if scale is None:
        return weight.to(dtype)
    if spec.fmt == "fp4":
        return quant.dequantise_fp4(weight, scale, dtype)
    return (quant.dequantise_fp8_rows if spec.rowwise else quant.dequantise_fp8_block)(weight, scale, dtype)


# --- a rank's part ---


def stored_cut(path: str, spec: Spec, cut: Cut, part: str) -> Cut:
    """A cut of the logical shape as a cut of the stored weight or scale. Raises where it would split a unit."""
    dim, start, stop = cut
    rows, columns = len(spec.shape) - 2, len(spec.shape) - 1
    unit = 1
    if part == "scale" and (dim == columns or (dim == rows and spec.fmt == "fp8" and not spec.rowwise)):
        unit = quant.GROUP
    elif part == "weight" and dim == columns and spec.fmt == "fp4":
        unit = 2
    whole = stop == spec.shape[dim]
    if start % unit or (stop % unit and not whole):
        raise ValueError(
            f"{path}: dim {dim} of shape {spec.shape} is cut at {start}:{stop}, inside a group of {unit} that shares "
            f"a stored {part}; cut at multiples of {unit}, or replicate it"
        )
    return dim, start // unit, -(-stop // unit)
