"""Constants of the Engram hash: canonical token map, multipliers, primes. Pure functions of config and tokenizer.

V vocabulary, G largest n-gram, H heads per n-gram size.
"""

from collections.abc import Callable, Sequence

import numpy as np

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are no whole character
INT64_MAX = 2**63 - 1
LAYER_SEED = 10007  # the release seeds each layer's multipliers with this times the layer number


def canonical_map(pieces: Sequence[str], raw: Sequence[str], normalise: Callable[[str], str]) -> tuple[list[int], int]:
    """Fold tokens that read alike (case, accents, white space) onto one id, numbered in first-seen order.

    ``pieces[i]`` is token i decoded with specials kept, ``raw[i]`` its vocabulary string, ``normalise`` the chain of
    spec 8.1. Returns (token_map [V], number of canonical ids).
    """
    if len(pieces) != len(raw):
        raise ValueError(f"pieces and raw must pair up, got {len(pieces)} and {len(raw)}")
    seen: dict[str, int] = {}
    token_map = []
    for piece, spelling in zip(pieces, raw, strict=True):
        key = spelling if REPLACEMENT in piece else normalise(piece) or piece
        token_map.append(seen.setdefault(key, len(seen)))
    return token_map, len(seen)


def multipliers(layer: int, compressed_size: int, ngram: int) -> list[int]:
    """The ``ngram`` odd factors of a layer; small enough that id * factor never overflows int64 (spec 8.2)."""
    half_range = (INT64_MAX // compressed_size) // 2
    draws = np.random.default_rng(LAYER_SEED * layer).integers(0, half_range, size=ngram, dtype=np.int64)
    return [int(d) * 2 + 1 for d in draws]


def primes(layers: int, start: int, ngram: int, heads: int) -> list[list[list[int]]]:
    """Table sizes [layer][n-gram size 2..G][head]: distinct primes, each search starting again at ``start``.

    ``start`` is ``engram_vocab_size``; the search takes numbers >= start (spec 8.2: larger than start - 1).
    """
    used: set[int] = set()

    def take() -> int:
        n = start
        while n in used or not _is_prime(n):
            n += 1
        used.add(n)
        return n

    return [[[take() for _ in range(heads)] for _ in range(ngram - 1)] for _ in range(layers)]


def table_rows(sizes: Sequence[Sequence[int]]) -> int:
    """Rows of one layer's embedding table: all its primes together."""
    return sum(sum(row) for row in sizes)


def offsets(sizes: Sequence[Sequence[int]]) -> list[int]:
    """First table row of each column, columns ordered n-gram size major, head minor."""
    flat = [n for row in sizes for n in row]
    return [sum(flat[:i]) for i in range(len(flat))]


def _is_prime(n: int) -> bool:
    if n < 2 or n % 2 == 0:
        return n == 2
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))
