"""The cache: global pages, window rings, compressor tails, last tokens, expert load (pools, written in place).

Page 0 and slot 0 are scratch: padding and rows that must not be written go there. Layout of a page: one plane per
source and kind, so that all a token owns globally is in one contiguous page (one transfer descriptor).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rows import row_bytes
from model import tree
from model.config import ModelConfig


@tree.node
class Cache:
    """``pages`` plain [pages * stride, atom] or packed bytes; rows are addressed as in kernels/rows.py."""

    pages: Tensor
    rings: Tensor  # plain [slots * rings * ring_size, hd] or packed bytes
    tails: Tensor  # [slots * ratio-2 sources * tail_depth, 2 * hd] fp32: value and gate of the last tokens
    tokens: Tensor  # [slots * token_depth] int64 last token ids
    load: Tensor  # [rings, P + 1] int64 tokens sent to each expert slot, last column padding


@tree.node
class Address:
    """Where one layer's rows are: scalars as tensors, so that equal layers share a compiled graph."""

    ring: Tensor  # [] first ring row of the layer within a slot
    tail: Tensor  # [] first tail row within a slot
    layer: Tensor  # [] row of the load counters
    planes: Tensor  # [5] kernels/rows.py, of the source this layer reads


@dataclass(frozen=True)
class Layout:
    """Geometry of every pool. ``page_size`` tokens a page; ``storage`` plain or packed; ``redundant`` expert slots of a
    layer, over all ranks, beside one for each expert."""

    cfg: ModelConfig
    storage: str = "plain"
    page_size: int = 64
    redundant: int = 0

    def __post_init__(self):
        if self.page_size < 1 or self.page_size % 64:
            raise ValueError(f"page_size must be a multiple of 64, got {self.page_size}")

    @property
    def packed(self) -> bool:
        return self.storage == "packed"

    @property
    def atom(self) -> int:
        """Values per atom of a plain pool."""
        return math.gcd(self.cfg.head_dim, self.cfg.index_head_dim)

    def plane_units(self, source: int) -> tuple[int, int, int, int]:
        """Units (bytes packed, atoms plain) of a page's planes: latent codes, scales, index codes, scales."""
        rows = self.page_size // self.cfg.compress_ratios[source]
        hd, di = self.cfg.head_dim, self.cfg.index_head_dim
        if self.packed:
            units = (*row_bytes("nvfp4", hd), *row_bytes("mxfp4", di))
        else:
            units = (hd // self.atom, 0, di // self.atom, 0)
        return tuple(rows * u for u in units)

    @property
    def stride(self) -> int:
        """Units of one page."""
        return sum(sum(self.plane_units(s)) for s in self.cfg.kv_source_layer_ids)

    def page_bytes(self, dtype: torch.dtype) -> int:
        return self.stride if self.packed else self.stride * self.atom * dtype.itemsize

    @property
    def bytes_per_token(self) -> float:
        """Global KV bytes a token owns in packed storage (spec section 12: 890 at Flash)."""
        stride = Layout(self.cfg, "packed", self.page_size).stride
        return stride / self.page_size

    def ring_row_bytes(self, dtype: torch.dtype) -> int:
        return sum(row_bytes("fp8", self.cfg.head_dim)) if self.packed else self.cfg.head_dim * dtype.itemsize

    @property
    def slot_rings(self) -> int:
        """Ring rows of one slot."""
        return self.cfg.num_rings * self.cfg.ring_size

    @property
    def tail_depth(self) -> int:
        """Positions a compressor tail holds: the pending token and a whole rejected block."""
        return self.cfg.dspark_block_size + 2

    @property
    def token_depth(self) -> int:
        return self.cfg.engram_max_ngram_size + self.cfg.dspark_block_size + 1

    @property
    def slot_tails(self) -> int:
        return max(len(self.cfg.tail_sources), 1) * self.tail_depth

    def slot_parts(self, dtype: torch.dtype) -> tuple[int, int, int]:
        """Bytes that one sequence has beside its pages: rings, tails, last tokens."""
        tail = 2 * self.cfg.head_dim * torch.float32.itemsize
        rings = self.slot_rings * self.ring_row_bytes(dtype)
        return rings, self.slot_tails * tail, self.token_depth * torch.int64.itemsize

    def slot_bytes(self, dtype: torch.dtype) -> int:
        return sum(self.slot_parts(dtype))

    def cache_bytes(self, pages: int, slots: int, dtype: torch.dtype) -> int:
        """All that `allocate` takes but the load counters."""
        return pages * self.page_bytes(dtype) + slots * self.slot_bytes(dtype)

    def planes(self, source: int) -> list[int]:
        start = 0
        for s in self.cfg.kv_source_layer_ids:
            units = self.plane_units(s)
            if s == source:
                first = [start + sum(units[:i]) for i in range(4)]
                return [*first, self.page_size // self.cfg.compress_ratios[s]]
            start += sum(units)
        raise ValueError(f"layer {source} owns no compressed KV; sources: {self.cfg.kv_source_layer_ids}")

    def addresses(self, device: torch.device | str = "cpu") -> tuple[Address, ...]:
        """One per backbone layer, then one per drafter stage."""
        cfg = self.cfg
        out = []
        for layer in range(cfg.num_rings):
            source = cfg.source_of(layer)
            tail = cfg.tail_sources.index(layer) * self.tail_depth if layer in cfg.tail_sources else 0
            planes = [0, 0, 0, 0, 1] if source is None else self.planes(source)
            numbers = (layer * cfg.ring_size, tail, layer, planes)
            out.append(Address(*(torch.tensor(v, dtype=torch.int64, device=device) for v in numbers)))
        return tuple(out)

    def allocate(self, pages: int, slots: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Cache:
        """Zeroed pools for ``pages`` pages and ``slots`` sequences, scratch page 0 and slot 0 included."""
        cfg = self.cfg
        if pages < 2 or slots < 2:
            raise ValueError(f"the cache needs >= 2 pages and slots (number 0 is scratch), got {pages} and {slots}")
        new = lambda shape, kind: torch.zeros(shape, dtype=kind, device=device)  # noqa: E731
        rows = slots * self.slot_rings
        if self.packed:
            pools = new(pages * self.stride, torch.uint8), new(rows * self.ring_row_bytes(dtype), torch.uint8)
        else:
            pools = new((pages * self.stride, self.atom), dtype), new((rows, cfg.head_dim), dtype)
        experts = max(cfg.n_routed_experts, cfg.dspark_n_routed_experts)
        return Cache(
            *pools,
            tails=new((slots * self.slot_tails, 2 * cfg.head_dim), torch.float32),
            tokens=new((slots * self.token_depth,), torch.int64),
            load=new((cfg.num_rings, experts + self.redundant + 1), torch.int64),
        )

    def copy_slot(self, cache: Cache, source: int, target: int) -> None:
        """Copy all of a sequence that is not in pages: window rings, compressor tails, last tokens."""
        ring = self.slot_rings * (self.ring_row_bytes(cache.rings.dtype) if self.packed else 1)
        for pool, size in ((cache.rings, ring), (cache.tails, self.slot_tails), (cache.tokens, self.token_depth)):
            pool[target * size : (target + 1) * size] = pool[source * size : (source + 1) * size]
