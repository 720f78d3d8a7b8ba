"""A parallel plan as data: axes over the ranks, and rules that place parameters on them by path.

    axes: {dp: 8, ep: 8}
    rules:                                             # parameter path -> placement; first match wins
      - [layers.*.block.ffn.experts.*, {shard: 0, axis: ep}]
      - [layers.*.engram.embed, {place: shard, shard: 0, axis: ep, uneven: ceil, optional: true}]
      - ["*", replicate]

All axes lie over the same ranks: on an axis of size n, rank r has index r % n, and every size divides the world, which
is the largest. A placement is ``replicate``, ``host``: all of it, one copy for the ranks of a node (parallel/
hosttable.py), or ``shard: dim`` along an axis; ``uneven: ceil`` gives each rank ceil(size / n) rows and the last ones
what is left; ``optional`` lets a rule match nothing. ``place`` picks one of the three where a mapping has room for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from parallel.eplb.settings import Eplb

AGREE = ("gloo", "recursive")
DISPATCH = ("allgather", "alltoall")
OFF = Eplb()
PLACEMENT_KEYS = ("place", "shard", "axis", "uneven", "optional")
PLACES = ("shard", "replicate", "host")


@dataclass(frozen=True)
class Rule:
    """Parameters whose path matches ``glob`` (``*`` also spans dots); ``shard`` None = every rank holds all of it, with
    ``host`` in memory that the ranks of its node share."""

    glob: str
    shard: int | None = None
    axis: str | None = None
    uneven: bool = False
    optional: bool = False
    host: bool = False


@dataclass(frozen=True)
class Plan:
    """Where each parameter lives. Hashable, so that it can be part of what a graph is compiled for."""

    axes: tuple[tuple[str, int], ...]
    rules: tuple[Rule, ...]
    agree: str = "gloo"  # how the ranks agree on a step: parallel/agree
    eplb: Eplb = OFF
    dispatch: str = "allgather"  # how rows get to their experts: parallel/expert.py, parallel/alltoall.py

    def __post_init__(self):
        if self.dispatch not in DISPATCH:
            raise ValueError(f"parallel.dispatch must be one of {', '.join(DISPATCH)}, got {self.dispatch!r}")
        if self.agree not in AGREE:
            raise ValueError(f"parallel.agree must be one of {', '.join(AGREE)}, got {self.agree!r}")
        for name, size in self.axes:
            if type(size) is not int or size < 1:
                raise ValueError(f"parallel.axes.{name} must be an integer >= 1, got {size!r}")
            if self.world % size:
                raise ValueError(f"parallel.axes.{name} must divide the largest axis {self.world}, got {size}")
        sizes = dict(self.axes)
        for rule in self.rules:
            if rule.shard is not None and rule.axis not in sizes:
                raise ValueError(f"parallel.rules: {rule.glob!r} names axis {rule.axis!r}; axes: {sorted(sizes)}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return max((size for _, size in self.axes), default=1)

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def coords(self, rank: int) -> dict[str, int]:
        """The rank's index on each axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank must be in 0..{self.world - 1} under this plan, got {rank}")
        return {name: rank % size for name, size in self.axes}

    def rule(self, path: str) -> Rule:
        """The first rule that matches ``path``."""
        for rule in self.rules:
            if fnmatchcase(path, rule.glob):
                return rule
        raise ValueError(f"parallel.rules: no rule matches parameter {path!r}; end the list with ['*', replicate]")

    def slice(self, path: str, shape: Sequence[int], coords: Mapping[str, int]) -> tuple[int, int, int] | None:
        """What the rank at ``coords`` holds of a parameter: (dim, start, stop), or None = all of it."""
        rule = self.rule(path)
        if rule.shard is None or self.size(rule.axis) == 1:
            return None
        n, index = self.size(rule.axis), coords[rule.axis]
        if rule.shard >= len(shape):
            raise ValueError(
                f"parallel.rules: {rule.glob!r} shards dim {rule.shard} of {path!r}, whose shape is {tuple(shape)}"
            )
        rows = shape[rule.shard]
        if rows % n and not rule.uneven:
            raise ValueError(
                f"parallel.rules: dim {rule.shard} of {path!r} has {rows} entries, which axis {rule.axis!r} of size "
                f"{n} does not divide; change the axis, or say 'uneven: ceil'"
            )
        each = -(-rows // n)
        return rule.shard, min(index * each, rows), min((index + 1) * each, rows)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Every parameter has a rule that fits it, every rule a parameter. Raises ValueError with the path."""
        used = set()
        for path, shape in shapes.items():
            used.add(self.rule(path))
            self.slice(path, shape, self.coords(0))
        for rule in self.rules:
            if rule not in used and not rule.optional:
                raise ValueError(f"parallel.rules: {rule.glob!r} matches no parameter; fix it, or say 'optional: true'")


def parse(
    axes: Mapping[str, int],
    rules: Sequence[Sequence[Any]],
    agree: str = "gloo",
    eplb: Eplb = OFF,
    dispatch: str = "allgather",
) -> Plan:
    """A Plan from plain values: ``axes`` name -> size, ``rules`` a list of [glob, placement]."""
    if not isinstance(axes, Mapping):
        raise ValueError(f"parallel.axes must be a mapping of axis name -> size, got {axes!r}")
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise ValueError(f"parallel.rules must be a list of [path glob, placement], got {rules!r}")
    return Plan(tuple(axes.items()), tuple(_rule(r) for r in rules), agree, eplb, dispatch)


def _rule(entry: Sequence[Any]) -> Rule:
    if isinstance(entry, str) or not isinstance(entry, Sequence) or len(entry) != 2 or not isinstance(entry[0], str):
        raise ValueError(f"parallel.rules: a rule is [path glob, placement], got {entry!r}")
    glob, placement = entry
    if placement in ("replicate", "host"):
        return Rule(glob, host=placement == "host")
    if not isinstance(placement, Mapping):
        raise ValueError(
            f"parallel.rules: {glob!r}: a placement is 'replicate', 'host' or a mapping, got {placement!r}"
        )
    unknown = sorted(set(placement) - set(PLACEMENT_KEYS))
    if unknown:
        raise ValueError(f"parallel.rules: {glob!r}: unknown keys {unknown}; known: {list(PLACEMENT_KEYS)}")
    place = placement.get("place", "shard")
    if place not in PLACES:
        raise ValueError(f"parallel.rules: {glob!r}: place must be one of {', '.join(PLACES)}, got {place!r}")
    shard, axis = placement.get("shard"), placement.get("axis")
    if place == "shard" and ((type(shard) is not int or shard < 0) or not isinstance(axis, str)):
        raise ValueError(f"parallel.rules: {glob!r}: needs 'shard: <dim>' and 'axis: <name>', got {dict(placement)}")
    if placement.get("uneven") not in (None, "ceil"):
        raise ValueError(f"parallel.rules: {glob!r}: uneven must be 'ceil', got {placement['uneven']!r}")
    optional = placement.get("optional", False)
    if type(optional) is not bool:
        raise ValueError(f"parallel.rules: {glob!r}: optional must be true or false, got {optional!r}")
    if place != "shard":
        return Rule(glob, optional=optional, host=place == "host")
    return Rule(glob, shard, axis, placement.get("uneven") == "ceil", optional)
