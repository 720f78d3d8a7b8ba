"""One ragged step: what the host packs (`Batch`), what the rows see (`View`), what layers hand on (`Carry`).

N rows (tokens, those of a sequence adjacent, padded), B sequences (number 0 is scratch), P pages a table,
T tiles of R rows of one sequence, W window, n max n-gram, C streams, D model dim, K index_topk.
"""

import torch
from torch import Tensor

from model import tree
from model.cache import Cache, Layout
from model.config import ModelConfig


@tree.node
class Batch:
    """Integers of one step, all int64. Prefill, decode, verify and replay differ only in these."""

    tokens: Tensor  # [N]
    positions: Tensor  # [N], -1 padding
    seqs: Tensor  # [N] sequence of each row, 0 padding
    slot_mapping: Tensor  # [N] page * page_size + offset where the row's global KV goes; 0 = not to be written
    floors: Tensor  # [N] lowest position the row's window may see (bounded replay; else 0)
    slots: Tensor  # [B] cache slot
    starts: Tensor  # [B] position of the sequence's first row in this step
    ends: Tensor  # [B] position after its last row
    first_rows: Tensor  # [B] row number of its first row
    page_tables: Tensor  # [B, P]
    tiles: Tensor  # [T, R] row numbers, -1 none
    tile_of: Tensor  # [N] place of a row in the flattened tiles
    tile_seqs: Tensor  # [T] sequence of each tile


@tree.node
class HashConstants:
    """One Engram layer's hash, int64 (spec section 8.2)."""

    multipliers: Tensor  # [n]
    primes: Tensor  # [n - 1, heads]
    offsets: Tensor  # [n - 1, heads] first row of each column's table


@tree.node
class Constants:
    """Tensors made once from the config: RoPE frequencies, Engram's token map and hash constants."""

    window_freqs: Tensor  # [rd/2] fp32
    compress_freqs: Tensor  # [rd/2] fp32
    token_map: Tensor  # [V] compressed token ids
    hashes: tuple[HashConstants, ...]  # one per Engram layer


@tree.node
class View:
    """Derived once a step and read by every layer."""

    positions: Tensor  # [N], -1 padding
    window: Tensor  # [N, W] entries as kernels/attention.py reads them, without the layer's ring offset
    ring_rows: Tensor  # [N] where the row's window latent goes, without the layer's offset
    tail_rows: Tensor  # [N] where the row's compressor state goes, without the layer's offset
    tail_prev: Tensor  # [N] where the previous token's state is: tail row >= 0, or -2 - row of this step
    history: Tensor  # [N, n] compressed ids of the token and those before it
    window_rope: tuple[Tensor, Tensor]  # cos, sin [N, rd/2]
    compress_rope: tuple[Tensor, Tensor]
    pair_rope: tuple[Tensor, Tensor]  # at the first token of the row's pair


@tree.node
class Carry:
    """What one layer hands to the next, and nothing else. Its structure never changes."""

    x: Tensor  # [N, C, D] streams
    pre: Tensor  # [N, C] fp32 pre-mix of the previous half-block
    topk_idxs: Tensor  # [N, K] int64 last published selection, -1 none
    blocks: Tensor  # [N, candidate blocks] bool last published candidates


def window_entries(cfg: ModelConfig, batch: Batch, layout: Layout) -> Tensor:
    """[N, W] entries of each row's window, oldest first: ring row, -2 - row of this step, or -1."""
    pos = batch.positions.unsqueeze(-1)
    keys = pos - (cfg.sliding_window - 1) + torch.arange(cfg.sliding_window, device=pos.device)
    start = batch.starts[batch.seqs].unsqueeze(-1)
    slot = batch.slots[batch.seqs].unsqueeze(-1)
    fresh = -2 - (batch.first_rows[batch.seqs].unsqueeze(-1) + keys - start)
    entry = torch.where(keys >= start, fresh, slot * layout.slot_rings + keys % cfg.ring_size)
    seen = (keys >= batch.floors.unsqueeze(-1)) & (keys >= 0) & (pos >= 0)
    return torch.where(seen, entry, -1)


def rope(positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [N, rd/2] of the fp32 product position * frequency (spec 14.10)."""
    angle = positions.float().unsqueeze(-1) * freqs
    return angle.cos(), angle.sin()


def look(cfg: ModelConfig, layout: Layout, consts: Constants, batch: Batch, cache: Cache) -> View:
    """Derive what the rows see; writes the step's tokens into ``cache.tokens``."""
    pos, slot = batch.positions, batch.slots[batch.seqs]
    valid, end = pos >= 0, batch.ends[batch.seqs]
    depth = layout.tail_depth
    ring = slot * layout.slot_rings + pos % cfg.ring_size
    tail = slot * layout.slot_tails
    rows = torch.arange(pos.shape[0], device=pos.device)
    prev_fresh = pos - 1 >= batch.starts[batch.seqs]
    return View(
        positions=pos,
        window=window_entries(cfg, batch, layout),
        ring_rows=torch.where(valid & (pos >= end - cfg.ring_size), ring, 0),
        tail_rows=torch.where(valid & (pos >= end - depth), tail + pos % depth, 0),
        tail_prev=torch.where(prev_fresh, -2 - (rows - 1), tail + (pos - 1) % depth),
        history=_history(cfg, layout, consts, batch, cache),
        window_rope=rope(pos, consts.window_freqs),
        compress_rope=rope(pos, consts.compress_freqs),
        pair_rope=rope(pos - pos % 2, consts.compress_freqs),
    )


def _history(cfg: ModelConfig, layout: Layout, consts: Constants, batch: Batch, cache: Cache) -> Tensor:
    """[N, n] compressed ids of positions t, t-1, ..; the pad's id before the start. Stores this step's tokens."""
    pos, depth = batch.positions.unsqueeze(-1), layout.token_depth
    back = torch.arange(cfg.engram_max_ngram_size, device=pos.device)
    want = pos - back
    start, first = batch.starts[batch.seqs].unsqueeze(-1), batch.first_rows[batch.seqs].unsqueeze(-1)
    slot = batch.slots[batch.seqs].unsqueeze(-1) * depth
    fresh = batch.tokens[(first + want - start).clamp(min=0)]
    ids = torch.where(want >= start, fresh, cache.tokens[slot + want % depth])
    ids = torch.where(want >= 0, ids, cfg.engram_pad_token_id)
    keep = (batch.positions >= 0) & (batch.positions >= batch.ends[batch.seqs] - depth)
    cache.tokens[torch.where(keep, slot[:, 0] + batch.positions % depth, 0)] = batch.tokens
    return consts.token_map[ids]
