"""Mappings to dataclasses: nested ones too; each slip is named by its whole key."""

from dataclasses import dataclass

import pytest

from scripts.mapping import UnknownKey, at_least, from_mapping


@dataclass(frozen=True)
class Inner:
    size: int
    pair: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Outer:
    inner: Inner
    names: tuple[str, ...]
    given: int
    note: str | None = None

    def __post_init__(self):
        at_least(1, self, ("given",), "outer.")


GOOD = {"inner": {"size": 3, "pair": [1, 2.5]}, "names": ["a", "b"]}


def test_nested_values_arrive():
    made = from_mapping(Outer, GOOD, "", given=1)
    assert made == Outer(Inner(3, (1.0, 2.5)), ("a", "b"), 1) and type(made.inner.pair[0]) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": None}, "inner must be a mapping of size, pair, got None"),
        ({"inner": {"size": "3"}}, "inner.size must be int, got '3'"),
        ({"inner": {}}, "key inner.size is missing"),
        ({"inner": {"size": 1, "width": 2}}, "unknown key inner.width; known in inner: size, pair"),
        ({"inner": {"size": 1, "pair": [1]}}, "inner.pair must be a list of 2, got .1."),
        ({"names": "a"}, "names must be"),
        ({"note": 3}, "note must be str or null, got 3"),
        ({"given": 2}, "unknown key given; known: inner, names, note"),
    ],
)
def test_slips_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_mapping(Outer, GOOD | change, "", given=1)


def test_unknown_key_knows_its_key():
    with pytest.raises(UnknownKey) as error:
        from_mapping(Inner, {"width": 1}, "a.b.")
    assert error.value.key == "a.b.width"


def test_at_least():
    with pytest.raises(ValueError, match=r"outer\.given must be >= 1, got 0"):
        from_mapping(Outer, GOOD, "", given=0)
