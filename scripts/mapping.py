"""From mappings to dataclasses: unknown keys, missing keys and wrong types refused by name."""

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class UnknownKey(ValueError):
    """A key that nobody reads; says which there are beside it."""

    def __init__(self, key: str, names: Sequence[str]):
        self.key = key
        group = key.rpartition(".")[0]
        super().__init__(f"unknown key {key}; known{f' in {group}' if group else ''}: {', '.join(names)}")


def known(values: Mapping[str, Any], names: Sequence[str], where: str, complete: bool = False) -> None:
    """Raise ValueError for a key that is not one of ``names``, or, if ``complete``, a name that has no key."""
    for key in values:
        if key not in names:
            raise UnknownKey(f"{where}{key}", names)
    for name in names:
        if complete and name not in values:
            raise ValueError(f"key {where}{name} is missing")


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str, **done: Any) -> T:
    """``cls(**values, **done)``; lists become tuples, mappings the dataclass that the field is."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where.removesuffix('.')} must be {_wanted(cls)}, got {values!r}")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.name not in done]
    known(values, names, where)
    for f in fields(cls):
        given = f.name in values or f.name in done
        if not given and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"key {where}{f.name} is missing")
    return cls(**{k: typed(v, hints[k], where + k) for k, v in values.items()}, **done)


def typed(value: Any, hint: Any, key: str) -> Any:
    """``value`` as the field's type: a scalar, a tuple of scalars, a dataclass or mapping, or one of these or None."""
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in choices:
        if is_dataclass(kind) and isinstance(value, Mapping):
            return from_mapping(kind, value, f"{key}.")
        if typing.get_origin(kind) is Mapping and isinstance(value, Mapping):
            return value
        if typing.get_origin(kind) is tuple and isinstance(value, list):
            parts = typing.get_args(kind)
            if parts[-1] is Ellipsis or len(parts) == len(value):
                return tuple(typed(v, parts[0], key) for v in value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            return value
    raise ValueError(f"{key} must be {' or '.join(map(_wanted, choices))}, got {value!r}")


def _wanted(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if is_dataclass(kind):
        return f"a mapping of {', '.join(f.name for f in fields(kind))}"
    if typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind):
        return f"a list of {len(typing.get_args(kind))}"
    return getattr(kind, "__name__", str(kind))


def at_least(least: int, values: Any, names: Sequence[str], where: str = "") -> None:
    """Raise ValueError for a field of ``values`` that is below ``least``."""
    for name in names:
        if getattr(values, name) < least:
            raise ValueError(f"{where}{name} must be >= {least}, got {getattr(values, name)}")
