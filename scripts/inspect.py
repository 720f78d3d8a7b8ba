"""What a model weighs, from its specs alone: tensors, parameters, bytes by format and by rank, cache bytes.

    python -m scripts.inspect model=flash parallel=dep parallel.axes.dp=32

Every figure follows from shapes; no weight is read or made.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from rich.console import Console
from rich.table import Table

from model import release, transformer, tree
from model.cache import Layout
from model.config import ModelConfig
from model.tree import Spec
from parallel.plan import Plan
from scripts.build import Settings
from scripts.entry import entry

GROUPS = {  # group -> paths of its leaves; first match wins, the drafter's own blocks included
    "drafter": "mtp.*",
    "Engram tables": "*.engram.embed",
    "Engram projections": "*.engram.*",
    "routed experts": "*.ffn.experts.*",
    "shared experts": "*.ffn.shared_experts.*",
    "router": "*.ffn.gate.*",
    "indexer": "*.attn.indexer.*",
    "compressor": "*.attn.compressor.*",
    "attention": "*.attn.*",
    "mHC": "*.hc_*",
    "embedding": "embed",
    "head": "head",
    "norms": "*",
}
ACTIVE = (
    "Active: the weights one token multiplies: k of E routed experts, all others but looked-up tables, no drafter. "
    "Prefill: layers up to the last KV source, as later ones see only a prompt's last window."
)
LOOKED_UP = ("embed", "*.embed")  # tables: a token reads a row of them, it multiplies by none


def group_of(path: str) -> str:
    return next(group for group, glob in GROUPS.items() if fnmatchcase(path, glob))


# --- parameters ---


def parameters(cfg: ModelConfig, specs: Mapping[str, Spec]) -> dict[str, int]:
    """Parameter counts; ``ACTIVE`` says what is active (prefill: spec section 13.2); decode adds the head."""
    drafter = sum(s.numel for p, s in specs.items() if p.startswith("mtp."))
    engram = sum(s.numel for p, s in specs.items() if ".engram." in p)
    total = sum(s.numel for s in specs.values())

    def active(path: str, spec: Spec) -> int:
        if any(fnmatchcase(path, glob) for glob in LOOKED_UP):
            return 0
        return spec.numel // cfg.n_routed_experts * cfg.num_experts_per_tok if spec.stack else spec.numel

    layers = Counter()
    for path, spec in specs.items():
        if path.startswith("layers."):
            layers[int(path.split(".")[1])] += active(path, spec)
    whole = sum(layers.values())
    return {
        "parameters": total,
        "parameters_backbone": total - drafter - engram,
        "parameters_engram": engram,
        "parameters_drafter": drafter,
        "parameters_active_decode": whole + active("norm", specs["norm"]) + active("head", specs["head"]),
        "parameters_active_prefill": sum(n for layer, n in layers.items() if layer <= cfg.last_source),
        "parameters_active_prefill_all_layers": whole,
    }


# --- bytes ---


def local_bytes(path: str, spec: Spec, cut: release.Cut | None) -> Counter:
    """Bytes by stored type of a leaf, or of a rank's cut of it, as loaded with ``weights=packed``.

    That is as stored, but F32 for the BF16 leaves that loading promotes.
    """
    weight = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.fmt == "fp4" else spec.shape
    kind = "F32" if spec.promote else release.STORED[spec.fmt]
    out = Counter({kind: _numel(path, spec, weight, cut, "weight") * release.TORCH[kind].itemsize})
    if spec.scale_shape:
        out["F8_E8M0"] += _numel(path, spec, spec.scale_shape, cut, "scale")
    return out


def _numel(path: str, spec: Spec, shape: tuple[int, ...], cut: release.Cut | None, part: str) -> int:
    if cut is None:
        return math.prod(shape)
    dim, start, stop = release.stored_cut(path, spec, cut, part)
    return math.prod(shape) // shape[dim] * (stop - start)


def rank_bytes(specs: Mapping[str, Spec], plan: Plan) -> list[int]:
    """Parameter bytes that each rank of the plan holds, without what its node's ranks share."""
    whole = {p: local_bytes(p, spec, None).total() for p, spec in specs.items() if not plan.rule(p).host}
    split = [path for path in specs if plan.slice(path, specs[path].shape, plan.coords(0))]
    shared = sum(size for path, size in whole.items() if path not in split)
    return [
        shared + sum(local_bytes(p, specs[p], plan.slice(p, specs[p].shape, plan.coords(r))).total() for p in split)
        for r in range(plan.world)
    ]


def host_bytes(specs: Mapping[str, Spec], plan: Plan) -> int:
    """Bytes that a node's ranks share in host memory."""
    return sum(local_bytes(path, spec, None).total() for path, spec in specs.items() if plan.rule(path).host)


# --- schema ---


def check_schema(specs: Mapping[str, Spec], schema: Mapping[str, release.Entry]) -> None:
    """Each kind of leaf, encoded on the meta device, has the types and shapes that the schema lists for it."""
    kinds: dict[Spec, str] = {}
    for path, spec in specs.items():
        kinds.setdefault(spec, path)
    for spec, path in kinds.items():
        one = release.one(spec)
        made = release.encode(one, torch.empty(one.shape, device="meta"))
        got = [(tuple(t.shape), t.dtype) for t in made if t is not None]
        names = itertools.islice((e.name for e in release.entries(path, spec)), len(got))  # one expert of a stack
        want = [(schema[name].shape, release.TORCH[schema[name].dtype]) for name in names]
        if got != want:
            raise ValueError(f"{path}: encodes to {got}, but the schema has {want}")


# --- the report ---


def inspect(cfg: ModelConfig, plan: Plan) -> dict[str, int | float]:
    """All figures, flat: what the result line holds."""
    specs = dict(tree.walk(transformer.specs(cfg)))
    schema = release.schema(cfg)
    check_schema(specs, schema)
    stored = Counter()
    for tensor in schema.values():
        stored[tensor.dtype] += tensor.nbytes
    held = rank_bytes(specs, plan)
    layout = Layout(cfg, storage="packed")
    per_token = layout.bytes_per_token
    ring = layout.slot_rings * layout.ring_row_bytes(torch.bfloat16)
    return {
        "kv_bytes_per_token": int(per_token) if per_token == int(per_token) else per_token,
        "window_bytes_per_sequence": ring,
        "tail_bytes_per_sequence": layout.slot_bytes(torch.bfloat16) - ring,
        "tensors": len(schema),
        **parameters(cfg, specs),
        "bytes": stored.total(),
        **{f"bytes_{kind.lower()}": stored[kind] for kind in release.TORCH},
        "ranks": plan.world,
        "bytes_per_rank": max(held),
        "bytes_per_rank_min": min(held),
        "bytes_host_per_node": host_bytes(specs, plan),
    }


def tables(cfg: ModelConfig, plan: Plan, result: Mapping[str, int | float]) -> list[Table]:
    """The parts of the model, and the totals, to read."""
    specs = dict(tree.walk(transformer.specs(cfg)))
    parts = {group: Counter() for group in GROUPS}
    tensors = Counter(tensor.path for tensor in release.schema(cfg).values())
    for path, spec in specs.items():
        part = parts[group_of(path)]
        part["tensors"] += tensors[path]
        part["parameters"] += spec.numel
        part["bytes"] += local_bytes(path, spec, None).total()
        cut = plan.slice(path, spec.shape, plan.coords(0))
        part["rank"] += 0 if plan.rule(path).host else local_bytes(path, spec, cut).total()
    by_part = Table("part", title="Parameters by part, in memory with weights=packed")
    for name in ("tensors", "parameters", "bytes", f"on rank 0 of {plan.world}"):
        by_part.add_column(name, justify="right")
    for group, part in parts.items():
        if part["tensors"]:
            by_part.add_row(group, f"{part['tensors']:,}", *(scaled(part[k]) for k in ("parameters", "bytes", "rank")))
    totals = Table("figure", title="Totals", caption=ACTIVE)
    totals.add_column("value", justify="right")
    totals.add_column("", justify="right")
    for key, value in result.items():
        totals.add_row(key, f"{value:,}", scaled(value) if value >= 10**5 else "")
    return [by_part, totals]


def scaled(value: float) -> str:
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:g}"


def run(s: Settings) -> dict[str, int | float]:
    """Print the tables; return the figures."""
    result = inspect(s.model, s.parallel)
    console = Console(width=100)
    for table in tables(s.model, s.parallel, result):
        console.print(table)
    return result


if __name__ == "__main__":
    entry(run)
