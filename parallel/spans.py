"""Lists of spans, and the pages they come from: pure array work. n spans [n, 3] int64 (region, offset, length), bytes.

A copy is a pair of lists of equal lengths. A post costs microseconds for each span whatever its size, so pages that are
adjacent on both sides become one span.
"""

from collections.abc import Iterator

import numpy as np

from parallel.port import SpanError

Pair = tuple[np.ndarray, np.ndarray]


def records(region: int, numbers: np.ndarray, size: int) -> np.ndarray:
    """The spans [n, 3] of records ``numbers`` [n] of ``size`` bytes that lie one after another in ``region``."""
    numbers = np.asarray(numbers, np.int64)
    return np.stack((np.full_like(numbers, region), numbers * size, np.full_like(numbers, size)), 1)


def cells(region: int, pages: np.ndarray, planes: np.ndarray, parts: int) -> np.ndarray:
    """Spans of ``pages`` [p], each cut into ``parts`` runs of tokens: [p * parts * k, 3], ordered by page, part, plane.

    ``planes`` [k] bytes: the planes of a page, each of which holds the page's tokens in order; a part has an equal
    share of every plane. Raises SpanError where a plane does not divide.
    """
    pages, planes = np.asarray(pages, np.int64), np.asarray(planes, np.int64)
    planes = planes[planes > 0]
    if (planes % parts).any():
        raise SpanError(f"planes of {planes.tolist()} bytes cannot be cut into {parts} parts")
    first = np.cumsum(planes) - planes
    share = planes // parts
    place = first + np.arange(parts)[:, None] * share  # [parts, k]
    offset = (pages[:, None, None] * int(planes.sum()) + place).reshape(-1)
    length = np.broadcast_to(share, (len(pages), parts, len(planes))).reshape(-1)
    return np.stack((np.full_like(offset, region), offset, length), 1)


def merge(a: np.ndarray, b: np.ndarray, most: int | None = None) -> Pair:
    """The same bytes in as few spans as can be: those adjacent on both sides become one, in order of ``b``.

    ``a`` and ``b`` [n, 3] have equal lengths, span by span; spans of one side do not overlap. ``most`` bytes in a span.
    """
    order = np.lexsort((b[:, 1], b[:, 0]))
    a, b = a[order], b[order]
    joined = np.ones(len(a), bool)
    for side in (a, b):
        joined[1:] &= (side[1:, 0] == side[:-1, 0]) & (side[1:, 1] == side[:-1, 1] + side[:-1, 2])
    joined[:1] = False
    first = np.flatnonzero(~joined)
    length = np.add.reduceat(a[:, 2], first) if len(a) else a[:, 2]
    out = tuple(np.stack((side[first, 0], side[first, 1], length), 1) for side in (a, b))
    return out if most is None else tuple(_shorter(side, most) for side in out)


def _shorter(spans: np.ndarray, most: int) -> np.ndarray:
    pieces = -(-spans[:, 2] // most)
    if (pieces == 1).all():
        return spans
    owner = np.repeat(np.arange(len(spans)), pieces)
    place = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    length = np.minimum(spans[owner, 2] - place, most)
    return np.stack((spans[owner, 0], spans[owner, 1] + place, length), 1)


def posts(a: np.ndarray, b: np.ndarray, most: int) -> Iterator[Pair]:
    """The pair in pieces of at most ``most`` spans: what one post may hold."""
    for at in range(0, len(a), most):
        yield a[at : at + most], b[at : at + most]
