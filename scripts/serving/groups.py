"""`serve.pools` of the config: which groups of engine processes a server starts, and what sets each apart."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.mapping import from_mapping
from serve.disagg.handoff import Rules

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


def ranks(pools: Mapping[str, Pool], world: int) -> int:
    """Engine processes of all pools, under a plan of ``world`` ranks."""
    return sum(pool.groups * (pool.dp or world) for pool in pools.values())


def build_pools(values: Mapping[str, Any] | None, handoff: Rules | None) -> dict[str, Pool]:
    """Pools by name. Raises ValueError for some that cannot serve together."""
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
    roles = {pool.role for pool in pools.values()}
    if roles == {"prefill"}:
        raise ValueError("serve.pools have prefill engines alone: add a pool with role=decode or role=both")
    if "prefill" in roles and handoff is None:
        raise ValueError("serve.pools with role=prefill need serve.handoff: use serve=disagg, or role=both")
    return pools
