"""Checkpoints in the released layout: parameter trees from files, from a seed, and back to files.

Reads only this rank's part, leaf by leaf; everything that headers can tell is checked before the first byte of a
tensor is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from model import release, transformer, tree
from model.config import ModelConfig
from model.release import Cut, Entry
from model.runtime import NUMERICS
from model.shards import Shards, Stored, is_finite, read_json, write_json, write_shards
from model.transformer import ModelParams
from model.tree import Quantized, Spec
from parallel.expert import first_plan
from parallel.hosttable import Node
from parallel.plan import Plan

WEIGHTS = ("dense", "packed")
SHARD_BYTES = 5 * 10**9
HOST_ROWS = 1 << 18  # of a table that go to host memory at a time


def read_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of ``folder/config.json``."""
    path = Path(folder) / "config.json"
    root = read_json(path)
    try:
        return ModelConfig.from_hf(root)
    except ValueError as err:
        raise ValueError(f"{path}: {str(err).removeprefix('config.json: ')}") from None


def load(
    where: str | Path,
    cfg: ModelConfig,
    *,
    numerics: str,
    weights: str = "dense",
    plan: Plan | None = None,
    rank: int = 0,
    device: str | torch.device = "cpu",
    redundant: int = 0,
    node: Node | None = None,
) -> ModelParams:
    """The parameters that ``rank`` holds under ``plan`` (all of them without one), leaf by leaf, never two copies; of
    experts sharded by number also those in its part of ``redundant`` slots (`parallel.expert.first_plan`).

    ``weights``: packed keeps quantised weights as stored; dense dequantises them once, exactly, to the compute type of
    ``numerics``. The Engram tables stay packed. Headers of all shards are checked first (names, types, shapes).
    ``node``: whom tables placed on the ``host`` are shared with.
    """
    _check_choice(numerics, weights)
    node = node or Node()
    with Shards(where) as shards:
        shards.check(release.schema(cfg))

        def leaf(path: str, spec: Spec) -> Tensor | Quantized:
            if _on_host(plan, path, spec):
                return _table(node, path, spec, lambda part: _blocks(shards, path, spec, part))
            cut = part(plan, rank, path, spec, redundant)
            return _read_leaf(shards, path, spec, cut, numerics, weights, device)

        return tree.build(leaf, transformer.specs(cfg))


def random(
    cfg: ModelConfig,
    key: int,
    numerics: str,
    weights: str = "dense",
    plan: Plan | None = None,
    rank: int = 0,
    device: str | torch.device = "cpu",
    redundant: int = 0,
    node: Node | None = None,
) -> ModelParams:
    """Seeded random parameters that could have come from a file: the same values on any plan, in any order."""
    _check_choice(numerics, weights)
    node = node or Node()

    def leaf(path: str, spec: Spec) -> Tensor | Quantized:
        if _on_host(plan, path, spec):
            made = cache(lambda: release.encode(spec, tree.draw(spec, key, path)))
            return _table(node, path, spec, lambda part: [made()[part == "scale"]])
        weight, scale = release.encode(spec, tree.draw(spec, key, path))
        cut = part(plan, rank, path, spec, redundant)
        if isinstance(cut, list):
            weight, scale = _rows(weight, cut), None if scale is None else _rows(scale, cut)
        elif cut is not None:
            weight = _narrow(weight, release.stored_cut(path, spec, cut, "weight"))
            scale = None if scale is None else _narrow(scale, release.stored_cut(path, spec, cut, "scale"))
        return _finish(spec, weight, scale, numerics, weights, device)

    return tree.build(leaf, transformer.specs(cfg))


def _check_choice(numerics: str, weights: str) -> None:
    if numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {NUMERICS}, got {numerics!r}")
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {WEIGHTS}, got {weights!r}")


def _on_host(plan: Plan | None, path: str, spec: Spec) -> bool:
    """Whether a leaf is shared by the ranks of a node. Raises ValueError for one that is not kept as it is stored."""
    if plan is None or not plan.rule(path).host:
        return False
    if not spec.rowwise:
        raise ValueError(f"parallel.rules: {path!r} is no table of rows; only those can be placed on the host")
    return True


def _table(node: Node, path: str, spec: Spec, blocks: Callable[[str], Iterable[Tensor]]) -> Quantized:
    """A table of rows and its scales in host memory, filled from ``blocks`` of ``weight`` and ``scale``."""
    parts = {"weight": (spec.shape, release.STORED[spec.fmt]), "scale": (spec.scale_shape, "F8_E8M0")}
    tables = [
        node.table(f"{path}.{part}", *shape, release.TORCH[kind], partial(blocks, part))
        for part, (shape, kind) in parts.items()
    ]
    return Quantized(*tables)


def _blocks(shards: Shards, path: str, spec: Spec, part: str) -> Iterator[Tensor]:
    """Consecutive rows of a table as stored, some at a time."""
    name = next(e.name for e in release.entries(path, spec) if e.part == part)
    for start in range(0, spec.shape[0], HOST_ROWS):
        yield shards.read(name, (0, start, min(start + HOST_ROWS, spec.shape[0])))


def part(plan: Plan | None, rank: int, path: str, spec: Spec, redundant: int) -> Cut | list[int] | None:
    """What a rank holds of a leaf: a cut; of experts sharded by number, which ones, slot by slot; None = all of it."""
    cut = None if plan is None else plan.slice(path, spec.shape, plan.coords(rank))
    if cut is None or not spec.stack or cut[0] != 0:
        return cut
    if not redundant:
        return list(range(*cut[1:]))
    axis = plan.rule(path).axis
    slots = first_plan(spec.shape[0], redundant, plan.size(axis)).view(plan.size(axis), -1)
    return slots[plan.coords(rank)[axis]].tolist()


def _rows(value: Tensor, rows: list[int]) -> Tensor:
    small = value.itemsize == 1  # types of one byte that torch does not index
    return value.view(torch.uint8)[rows].view(value.dtype) if small else value[rows]


def _narrow(value: Tensor, cut: Cut) -> Tensor:
    dim, start, stop = cut
    return value.narrow(dim, start, stop - start)


def _read_leaf(
    shards: Shards, path: str, spec: Spec, cut: Cut | list[int] | None, numerics: str, weights: str,
    device: str | torch.device,
) -> Tensor | Quantized:  # fmt: skip
    """One leaf, or its cut. Stacked experts are read one by one, each into its row."""
    parts: dict[int | None, list[Entry]] = {}
    for entry in release.entries(path, spec):
        parts.setdefault(entry.expert, []).append(entry)
    inner, experts = cut, []
    if spec.stack:
        experts = list(range(spec.shape[0]))
        if isinstance(cut, list):
            inner, experts = None, cut
        elif cut is not None:
            inner = (cut[0] - 1, *cut[1:])
    one = release.one(spec)

    def read(expert: int | None) -> Tensor | Quantized:
        stored = [shards.read(e.name, inner and release.stored_cut(path, one, inner, e.part)) for e in parts[expert]]
        return _finish(spec, stored[0], stored[1] if len(stored) > 1 else None, numerics, weights, device)

    return _stack(read, experts) if spec.stack else read(None)


def _stack(read: Callable[[int], Quantized], experts: list[int]) -> Quantized:
    """``read(e)`` of each expert as rows of one leaf."""
    first = read(experts[0] if experts else 0)  # for the shapes, where a rank holds none
    weight, scale = (None if t is None else t.new_empty((len(experts), *t.shape)) for t in (first.weight, first.scale))
    for row, e in enumerate(experts):
        got = first if row == 0 else read(e)
        weight[row].copy_(got.weight)
        if scale is not None:
            scale[row].copy_(got.scale)
    return Quantized(weight, scale)


def _finish(
    spec: Spec, weight: Tensor, scale: Tensor | None, numerics: str, weights: str, device: str | torch.device
) -> Tensor | Quantized:
    """Stored parts -> the leaf as the model takes it, on ``device``, in memory of its own."""
    if spec.fmt not in ("fp8", "fp4"):
        return weight.to(device, release.dense_dtype(spec, numerics), copy=True)
    if weights == "packed" or spec.rowwise:
        return Quantized(weight.to(device, copy=True), scale.to(device, copy=True))
    weight, scale = weight.to(device), scale.to(device)
    return Quantized(release.decode(spec, weight, scale, release.dense_dtype(spec, numerics)), None)


# --- writing ---


def save(where: str | Path, cfg: ModelConfig, params: ModelParams, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a whole (unsharded) tree: values are rounded to the released formats, packed leaves kept as they are."""
    leaves = dict(tree.walk(params))
    specs = dict(tree.walk(transformer.specs(cfg)))

    def stored(entry: Entry) -> tuple[Tensor, Tensor | None]:
        leaf = leaves[entry.path]
        weight, scale = (leaf.weight, leaf.scale) if isinstance(leaf, Quantized) else (leaf, None)
        if entry.expert is not None:
            weight, scale = weight[entry.expert], None if scale is None else scale[entry.expert]
        return (weight, scale) if scale is not None else _encode(specs[entry.path], entry.name, weight)

    _write(Path(where), cfg, stored, shard_bytes)


def write_release(
    where: str | Path, tensors: Mapping[str, Tensor], cfg: ModelConfig, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write values keyed by released weight name (experts one by one), rounded to the released formats.

    Raises ValueError for a name that is missing or unknown, a wrong shape, NaN or infinity.
    """
    specs = dict(tree.walk(transformer.specs(cfg)))
    wanted = {name: entry for name, entry in release.schema(cfg).items() if entry.part == "weight"}
    for name in tensors:
        if name not in wanted:
            raise ValueError(f"tensor {name!r} is unknown; weights go by their released names, without scales")
    for name, entry in wanted.items():
        if name not in tensors:
            raise ValueError(f"tensor {name!r} is missing")
        got, want = tuple(tensors[name].shape), release.one(specs[entry.path]).shape
        if got != want:
            raise ValueError(f"tensor {name!r} must have shape {want}, got {got}")
    _write(Path(where), cfg, lambda e: _encode(specs[e.path], e.name, tensors[e.name]), shard_bytes)


def _encode(spec: Spec, name: str, value: Tensor) -> tuple[Tensor, Tensor | None]:
    value = value.detach().cpu().float()
    if not is_finite(value):
        raise ValueError(f"tensor {name!r} holds NaN or infinity; it is not written")
    return release.encode(release.one(spec), value)


def _write(where: Path, cfg: ModelConfig, stored: Stored, shard_bytes: int) -> None:
    write_shards(where, release.schema(cfg), stored, shard_bytes)
    write_json(where / "config.json", cfg.to_hf())
