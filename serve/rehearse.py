"""A step of every size, on scratch memory, before any request is there. N rows, T tiles of R rows.

What libraries keep for a shape (kernels/sizes.py) and the memory that a large step needs are taken here, so that a
server's memory is level from its first request on, and no request waits for them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

from model import transformer
from model.batch import Batch
from model.pack import ROW_MULTIPLE, TILE_ROWS, Span, pack, padded
from serve.runner import Runner


def sizes(most: int, multiple: int = 1, octave: int = 8, least: int = 1) -> list[int]:
    """All that `padded` gives for ``least`` to ``most``, largest first."""
    return sorted({padded(n, multiple, octave) for n in range(least, most + 1)}, reverse=True)


def shapes(rows: int, sequences: int, least: int) -> Iterator[tuple[int, int, int]]:
    """(N, T, R): every size of a step of ``rows`` rows of ``sequences`` sequences at most, and every form that its
    tiles can have, the large ones with the fewest rows that fill one."""
    every = iter(sizes(rows, ROW_MULTIPLE, least=least))
    heights = sizes(min(TILE_ROWS, rows), octave=1, least=2)
    for tiles, height in product(sizes(sequences + rows // TILE_ROWS, 2), heights):
        yield next(every, padded(max(least, height), ROW_MULTIPLE)), 1 + tiles, height
    for n in every:
        yield n, 2, 2


@torch.no_grad()
def rehearse(runner: Runner, rows: int, sequences: int, drafts: bool = False) -> int:
    """Steps of ``rows`` rows and ``sequences`` sequences at most, of short contexts; returns how many were run. Ranks
    that share experts must do so together. Writes scratch memory only; what was counted of experts is forgotten."""
    count = 0
    for n, tiles, height in shapes(rows, sequences, runner.model.rt.least_rows):
        batch = formed(runner, n, tiles, height)
        transformer.forward(runner.model, runner.cache, batch, torch.arange(min(n, sequences), device=runner.device))
        count += 1
    for b in sizes(sequences, 2) if drafts else ():
        runner.draft_nothing(b)
        count += 1
    runner.cache.load.zero_()
    return count


def formed(runner: Runner, rows: int, tiles: int, height: int) -> Batch:
    """Sequences of ``height`` rows, of many tokens, so that all experts take part; ``rows`` and ``tiles`` as told, and
    where that is more than the sequences need, padding."""
    count = min(rows, height * (tiles - 1))
    tokens = np.arange(count) * 7919 % runner.model.cfg.vocab_size
    spans = [Span(tokens[i : i + height], 0, 0, (0, 0)) for i in range(0, count, height)]
    batch = pack(spans, runner.model.layout.page_size, rows, runner.device)
    more = max(0, tiles - len(batch.tiles))
    wide = F.pad(batch.tiles, (0, 0, 0, more), value=-1)
    return replace(batch, tiles=wide, tile_seqs=F.pad(batch.tile_seqs, (0, more)))
