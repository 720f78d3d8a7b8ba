"""The pools of an engine's cache as its peers see them: the card that describes them, and their regions on a link."""

import hashlib

import torch

from model.cache import Cache, Layout
from parallel.port import Link
from serve.disagg.card import VERSION, Card


def card(layout: Layout, dtype: torch.dtype, weights: str) -> Card:
    """The card of an engine. ``weights``: name of the checkpoint, the same on both sides."""
    cfg = layout.cfg
    unit = 1 if layout.packed else layout.atom * dtype.itemsize
    return Card(
        VERSION,
        f"{hashlib.sha256(repr(cfg).encode()).hexdigest()[:16]} {weights}",
        layout.storage,
        str(dtype).removeprefix("torch."),
        layout.page_size,
        tuple(n * unit for s in cfg.kv_source_layer_ids for n in layout.plane_units(s)),
        cfg.num_rings,
        cfg.ring_size,
        layout.slot_parts(dtype),
    )


def register(link: Link, cache: Cache) -> None:
    """Make the pools regions of ``link``, in the order of serve/disagg/copies.py."""
    for pool in (cache.pages, cache.rings, cache.tails, cache.tokens):
        link.register(pool)
