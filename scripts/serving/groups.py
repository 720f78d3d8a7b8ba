"""`serve.pools` of the config: which groups of engine processes a server starts, and what sets each apart."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scripts.mapping import from_mapping
from serve.disagg.handoff import Rules
from serve.settings import Serve

ROLES = ("prefill", "decode", "both")
SHARED = (
    "page_size",
    "handoff",
    "pools",
    "max_waiting",
    "router",
    "restart",
)  # of all pools: pages are named by what a page holds


@dataclass(frozen=True)
class Pool:
    """``groups`` of ``dp`` ranks each (None: the plan's). ``serve``: settings of serve.* for these engines alone."""

    role: str
    groups: int = 1
    dp: int | None = None
    serve: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"serve.pools.*.role must be one of {', '.join(ROLES)}, got {self.role!r}")
        for name in ("groups", "dp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"serve.pools.*.{name} must be >= 1, got {value}")
        for name in SHARED:
            if name in self.serve:
                raise ValueError(f"serve.pools.*.serve.{name}: all pools share one value, set serve.{name}")


ONE = {"engine": Pool("both")}  # without serve.pools


@dataclass(frozen=True)
class Berth:
    """One engine: ``rank`` of the ``size`` that share a ``group``."""

    pool: str
    group: str
    rank: int
    size: int

    @property
    def name(self) -> str:
        return f"{self.group}.{self.rank}"


def berths(pools: Mapping[str, Pool], world: int) -> list[Berth]:
    """Every engine of all pools, a group's one after another, under a plan of ``world`` ranks."""
    sizes = {name: pool.dp or world for name, pool in pools.items()}
    groups = [(name, f"{name}{i}") for name, pool in pools.items() for i in range(pool.groups)]
    return [Berth(name, group, rank, sizes[name]) for name, group in groups for rank in range(sizes[name])]


def pool_config(config: Path, name: str, pool: Pool) -> Path:
    """The config file of a pool's engines, written beside ``config`` as config-NAME.yaml."""
    if pool is ONE.get(name):
        return config
    values = OmegaConf.load(config)
    if pool.dp is not None:
        axes = OmegaConf.select(values, "parallel.axes", default={})
        whole = axes.get("dp")
        for axis in axes:
            if axes[axis] == whole:
                OmegaConf.update(values, f"parallel.axes.{axis}", pool.dp)
    values = OmegaConf.merge(values, {"serve": {**pool.serve, "pools": None}})
    written = config.with_name(f"{config.stem}-{name}.yaml")
    part = written.with_suffix(f".{os.getpid()}")  # ranks of a node that torchrun started write the same
    OmegaConf.save(values, part)
    os.replace(part, written)
    return written


def build_pools(values: Mapping[str, Any] | None, serving: Mapping[str, Any], handoff: Rules | None) -> dict[str, Pool]:
    """Pools by name, whose engines have ``serving`` but for what a pool says itself. Raises ValueError for some that
    cannot serve together, or not at all."""
    if values is None:
        return ONE
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"serve.pools must be null or name at least one pool, got {values!r}")
    pools = {}
    for name, said in values.items():
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise ValueError(f"serve.pools.{name}: a pool's name is letters, digits, - and _")
        if not isinstance(said, Mapping):
            raise ValueError(f"serve.pools.{name} must be a mapping with a role, got {said!r}")
        try:
            pools[name] = from_mapping(Pool, said, f"serve.pools.{name}.")
        except ValueError as error:
            raise ValueError(str(error).replace("serve.pools.*", f"serve.pools.{name}")) from None
        whole = OmegaConf.to_container(OmegaConf.merge(dict(serving), dict(pools[name].serve)))
        try:
            from_mapping(Serve, whole, "serve.")
        except ValueError as error:
            raise ValueError(str(error).replace("serve.", f"serve.pools.{name}.serve.", 1)) from None
    roles = {pool.role for pool in pools.values()}
    if roles == {"prefill"}:
        raise ValueError("serve.pools have prefill engines alone: add a pool with role=decode or role=both")
    if "prefill" in roles and handoff is None:
        raise ValueError("serve.pools with role=prefill need serve.handoff: use serve=disagg, or role=both")
    return pools
