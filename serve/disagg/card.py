"""What two engines must agree on to read each other's cache."""

from dataclasses import dataclass, fields

VERSION = 1  # of letters and layout


@dataclass(frozen=True)
class Card:
    """What two engines must agree on to read each other's cache. Sizes in bytes."""

    version: int
    model: str  # digest of the config, and which weights
    storage: str
    dtype: str
    page_size: int  # tokens
    planes: tuple[int, ...]  # of a page, one after another
    rings: int  # layers with a window, the drafter's included
    ring_size: int  # rows of one
    slot: tuple[int, int, int]  # bytes of a sequence's rings, tails, last tokens

    @property
    def page_bytes(self) -> int:
        return sum(self.planes)


def mismatch(mine: Card, theirs: Card) -> str:
    """Why two engines cannot hand requests over, naming each field that differs; empty if they can.

    Page sizes may differ if one is a multiple of the other: planes are cut (parallel/spans.py).
    """
    large, small = max(mine.page_size, theirs.page_size), min(mine.page_size, theirs.page_size)
    ratio = large // small if small else 0
    wrong = []
    for f in fields(Card):
        a, b = getattr(mine, f.name), getattr(theirs, f.name)
        if f.name == "page_size":
            same = bool(ratio) and ratio * small == large
        elif f.name == "planes":
            a, b = (tuple(n * large // max(c.page_size, 1) for n in c.planes) for c in (mine, theirs))
            same = a == b
        else:
            same = a == b
        if not same:
            wrong.append(f"{f.name} {a} here, {b} there")
    return "; ".join(wrong)
