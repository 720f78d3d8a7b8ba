"""KV pages: who holds which, what is cached, what may be reused. Plain Python and numpy; page 0 is scratch.

A page's name is the chained hash of its tokens and of all before them, so a prompt's longest cached prefix is a run of
lookups. Hashes are made by the front end (`chain`); the engine's thread only looks them up.
"""

import numpy as np
import xxhash

SALT = b"racklab"


def chain(tokens: np.ndarray, page_size: int, before: bytes = SALT) -> list[bytes]:
    """The chained hash of each full page of int32 ``tokens`` [n]; ``before`` is that of the page in front."""
    raw = memoryview(np.ascontiguousarray(tokens, np.int32)).cast("B")
    width, out = page_size * 4, []
    for at in range(0, len(raw) - width + 1, width):
        digest = xxhash.xxh3_128(before)
        digest.update(raw[at : at + width])
        before = digest.digest()
        out.append(before)
    return out
