"""Routing traces: which experts each token of each step chose, as `routing.npz` holds them, for placement studies.

T tokens of all steps in order, S steps, L layers (stages of the drafter), k experts a token, E experts, R requests.

    version                 []          int64, 1
    prompts                 [R]         int32   prompt tokens of each request: positions below are prefill
    {part}_ids              [T, L, k]   int16   expert of each choice, best first; distinct within a row
    {part}_offsets          [S + 1]     int64   tokens of step s are rows offsets[s] .. offsets[s + 1] - 1
    {part}_requests         [T]         int32   0 .. R - 1
    {part}_positions        [T]         int32
    {part}_experts          []          int64   E

with part ``target`` (the backbone) and, where the model drafts, ``drafter``, a step of which is one drafted block a
request. Rows of drafts that were rejected are in it: they were routed.
"""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallel.eplb import metric

VERSION = 1
MAX_EXPERTS = 1 << 14
UNREADABLE = (OSError, ValueError, EOFError, AttributeError, TypeError, RuntimeError, NotImplementedError)
KINDS = {"ids": np.int16, "offsets": np.int64, "requests": np.int32, "positions": np.int32, "experts": np.int64}
RANKS = {"ids": 3, "offsets": 1, "requests": 1, "positions": 1, "experts": 0}


@dataclass(frozen=True, eq=False)
class Trace:
    """One part of a routing trace, in the shapes above."""

    ids: np.ndarray
    offsets: np.ndarray
    requests: np.ndarray
    positions: np.ndarray
    experts: int

    def __post_init__(self):
        t = len(self.ids)
        if not self.ids.shape[1] or not self.ids.shape[2] or not 1 <= self.experts <= MAX_EXPERTS:
            raise ValueError(
                f"ids must have layers and choices, experts be 1 to {MAX_EXPERTS}: got {self.ids.shape}, {self.experts}"
            )
        if len(self.requests) != t or len(self.positions) != t:
            raise ValueError(f"ids, requests, positions have {t}, {len(self.requests)}, {len(self.positions)} tokens")
        o = self.offsets
        if len(o) < 1 or o[0] != 0 or o[-1] != t or (np.diff(o) < 0).any():
            raise ValueError(f"offsets must ascend from 0 to the {t} tokens of ids")
        if t and not 0 <= self.ids.min() <= self.ids.max() < self.experts:
            raise ValueError(f"ids must lie in 0..{self.experts - 1}")
        if t and (np.diff(np.sort(self.ids, -1), axis=-1) == 0).any():
            raise ValueError("ids repeat an expert within a token")

    @property
    def steps(self) -> int:
        return len(self.offsets) - 1

    def counts(self) -> np.ndarray:
        """int64 [L, E] choices of each expert over the whole trace."""
        return self.step_counts().sum(0)

    def step_counts(self) -> np.ndarray:
        """int64 [S, L, E] choices of each expert in each step."""
        layers = self.ids.shape[1]
        step = np.repeat(np.arange(self.steps), np.diff(self.offsets))
        where = (step[:, None, None] * layers + np.arange(layers)[:, None]) * self.experts + self.ids
        flat = np.bincount(where.ravel(), minlength=self.steps * layers * self.experts)
        return flat.reshape(self.steps, layers, self.experts)


@dataclass(frozen=True, eq=False)
class Routing:
    """What `routing.npz` holds. ``drafter`` is None for a model without one."""

    prompts: np.ndarray  # [R]
    target: Trace
    drafter: Trace | None = None


def save(path: Path, routing: Routing) -> None:
    arrays = {"version": np.int64(VERSION), "prompts": routing.prompts.astype(np.int32)}
    for part in ("target", "drafter"):
        trace = getattr(routing, part)
        if trace is not None:
            arrays |= {f"{part}_{name}": np.asarray(getattr(trace, name)).astype(kind) for name, kind in KINDS.items()}
    np.savez_compressed(path, **arrays)


def load(path: Path) -> Routing:
    """Read a trace. Raises ValueError naming the file and what is wrong with it; nothing of it is ever executed."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (*UNREADABLE, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: no routing trace: {error}") from None
    if int(_array(path, arrays, "version", np.int64, 0)) != VERSION:
        raise ValueError(f"{path}: version is {arrays['version']}, this reads {VERSION}")
    prompts = _array(path, arrays, "prompts", np.int32, 1)
    target = _part(path, arrays, "target", len(prompts))
    drafter = _part(path, arrays, "drafter", len(prompts)) if "drafter_ids" in arrays else None
    return Routing(prompts, target, drafter)


def _array(path: Path, arrays: dict[str, np.ndarray], name: str, kind: type, dims: int) -> np.ndarray:
    found = arrays.get(name)
    if found is None:
        raise ValueError(f"{path}: no array {name!r}")
    if found.dtype != kind or found.ndim != dims:
        raise ValueError(f"{path}: {name} must be {kind.__name__} of {dims} dims, is {found.dtype} {found.shape}")
    return found


def _part(path: Path, arrays: dict[str, np.ndarray], part: str, requests: int) -> Trace:
    values = {n: _array(path, arrays, f"{part}_{n}", kind, RANKS[n]) for n, kind in KINDS.items()}
    try:
        made = Trace(**(values | {"experts": int(values["experts"])}))
    except ValueError as error:
        raise ValueError(f"{path}: {part}: {error}") from None
    r, p = made.requests, made.positions
    if len(r) and not (0 <= r.min() <= r.max() < requests and p.min() >= 0):
        raise ValueError(f"{path}: {part}: requests must lie in 0..{requests - 1} and positions be >= 0")
    return made


def balancedness(counts: np.ndarray, ranks: int) -> float:
    """That of parallel/eplb/metric.py for counts [L, E], E / ranks experts on each rank, in order; of counts [S, L, E]
    the mean over steps. Raises ValueError if ranks does not divide E."""
    experts = counts.shape[-1]
    if experts % ranks:
        raise ValueError(f"{ranks} ranks do not divide {experts} experts")
    loads = metric.rank_loads(counts, ranks)
    return float(np.mean([metric.balancedness(t) for t in loads.reshape(-1, *loads.shape[-2:])]))
