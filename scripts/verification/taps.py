"""A prefill layer by layer, with everything the golden files name; inputs may be forced to the file's.

B sequences of S tokens in one step, rows in order: [B * S, ..] views as [B, S, ..].
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kernels.attention import read_window
from kernels.index import latent_slots
from kernels.rows import read_rows, write_rows
from model import transformer
from model.batch import Batch, View
from model.cache import Cache
from model.transformer import Model


class Pass:
    """A prefill of ``batch`` (B sequences of S tokens each), stepped layer by layer by the caller."""

    def __init__(self, model: Model, cache: Cache, batch: Batch, sequences: int, log: list):
        self.m, self.cache, self.batch, self.log = model, cache, batch, log
        self.b = sequences
        self.n = int((batch.positions >= 0).sum())
        begin = model.jit(transformer.begin, model.cfg, model.rt, model.layout)
        self.view: View
        self.view, self.carry = begin(model.params.embed, model.consts, batch, cache)
        self.inputs: list[Tensor] = []  # the drafter's taps

    def rows(self, t: Tensor) -> Tensor:
        """[rows of the step, ..] -> [B, S, ..]."""
        return t[: self.n].unflatten(0, (self.b, -1))

    def engram(self, i: int) -> dict[str, Tensor]:
        """Run the Engram in front of layer ``i``."""
        self.log.clear()
        before = self.carry
        self.carry = transformer.engram_step(self.m, i, self.view, self.carry)
        if self.carry is before:
            return {}
        found = {"engram_out": self.rows(self.carry.x)}
        for name, _, out in self.log:
            if name == "engram_hash":
                found["engram_hash_ids"] = self.rows(out)
        return found

    def layer(self, i: int) -> dict[str, Tensor]:
        """Run layer ``i`` and read what it left in the carry, the cache and the log."""
        self.log.clear()
        if i in self.m.cfg.dspark_target_layer_ids:
            self.inputs.append(transformer.tap(self.carry.x))
        self.carry = transformer.layer_step(self.m, i, self.batch, self.view, self.cache, self.carry)
        found = {"out_stream": self.rows(self.carry.x), "out_pre_mix": self.rows(self.carry.pre)}
        found.update(self._selection(i))
        found.update(dict(self._logged(i)))
        found["window_kv_ring"] = ring(self.m, self.cache, self.batch, i)
        if self.m.cfg.kind(i).ratio:
            found["compress_kv"], found["index_k"] = global_rows(self.m, self.cache, self.batch, i)
        return found

    def _selection(self, i: int) -> dict[str, Tensor]:
        kind, cfg = self.m.cfg.kind(i), self.m.cfg
        found = {}
        if kind.index:
            found["topk_positions"] = self.rows(self.carry.topk_idxs)
        if kind.publishes:
            found["candidate_mask"] = self.rows(self.carry.blocks.repeat_interleave(cfg.candidate_block_size, -1))
        return found

    def _logged(self, i: int) -> Iterator[tuple[str, Tensor]]:
        """Values that only a recorded op shows; none where the layer ran as a compiled graph."""
        compressor = self.m.params.layers[i].block.attn.compressor
        halves = iter(("attn_out", "ffn_out"))
        for name, args, out in self.log:
            if name == "mhc_post":
                yield next(halves), self.rows(args[0])
            elif name == "rms_norm" and compressor is not None and args[1] is compressor.norm:
                ratio = self.m.cfg.compress_ratios[i]
                yield "latent_pre_rope", self.rows(out)[:, ratio - 1 :: ratio]
            elif name in ("index_scores", "mask_blocks"):
                yield "index_score", self.rows(out)
            elif name == "route":
                yield "gate_ids", out[0][: self.n]
                yield "gate_weights", out[1][: self.n]

    def force(self, **values: Tensor) -> None:
        """Replace parts of the carry by the file's: x, pre, topk_idxs, blocks, each [B, S, ..] and as wide."""
        changed = {}
        for name, value in values.items():
            changed[name] = getattr(self.carry, name).clone()
            changed[name][: self.n] = value.flatten(0, 1).to(changed[name].dtype)
        self.carry = replace(self.carry, **changed)


def positions_of(batch: Batch) -> Tensor:
    """Sequence lengths after the step, [B] without the scratch sequence."""
    return batch.ends[1:]


def ring(m: Model, cache: Cache, batch: Batch, layer: int) -> Tensor:
    """The window ring of a layer as the files hold it: [B, W, hd], slot = position mod W, zeros where unfilled."""
    w, size = m.cfg.sliding_window, m.cfg.ring_size
    slot, end = batch.slots[1:].unsqueeze(-1), positions_of(batch).unsqueeze(-1)
    places = torch.arange(w)
    pos = end - 1 - (end - 1 - places) % w  # the newest position in each place
    rows = slot * m.layout.slot_rings + m.addresses[layer].ring + pos % size
    fresh = torch.zeros(1, m.cfg.head_dim, dtype=m.rt.dtype)
    return torch.where((pos >= 0).unsqueeze(-1), read_window(cache.rings, fresh, rows), 0)


def source_slots(m: Model, batch: Batch, layer: int) -> Tensor:
    """Cache slots of all latents that a source layer has written, [B, S // ratio]."""
    ratio = m.cfg.compress_ratios[layer]
    count = int(positions_of(batch).max()) // ratio
    latents = torch.arange(count).expand(batch.page_tables.shape[0] - 1, -1)
    return latent_slots(batch.page_tables[1:], latents, m.layout.page_size // ratio)


def global_rows(m: Model, cache: Cache, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """Compressed latents [B, S // ratio, hd] and index keys [B, S // ratio, Di] of a source layer."""
    slots, at = source_slots(m, batch, layer), m.addresses[layer]
    where = (cache.pages, slots, at.planes, m.layout.stride)
    latents = read_rows(*where, m.cfg.head_dim, "nvfp4", 0, m.rt.dtype)
    return latents, read_rows(*where, m.cfg.index_head_dim, "mxfp4", 2, m.rt.dtype)


def force_global_rows(m: Model, cache: Cache, batch: Batch, layer: int, latents: Tensor, keys: Tensor) -> None:
    """Overwrite a source's rows by the file's, for layers after one whose own input could not be forced."""
    slots, at = source_slots(m, batch, layer).flatten(), m.addresses[layer]
    where = (cache.pages, slots, at.planes, m.layout.stride)
    write_rows(*where, latents.flatten(0, 1).to(m.rt.dtype), "nvfp4", 0)
    write_rows(*where, keys.flatten(0, 1).to(m.rt.dtype), "mxfp4", 2)
