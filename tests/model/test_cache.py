"""Geometry of the pools: bytes, planes that tile a page, addresses, and what a layout refuses."""

import pytest
import torch
from omegaconf import OmegaConf

from kernels.rows import row_bytes
from model.cache import Layout
from model.config import ModelConfig
from scripts.build import ROOT, build_model_config
from tests.small import FULL1, FULL2, REUSE, WINDOW, config

FORMS = ["plain", "packed"]


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    return build_model_config(OmegaConf.load(ROOT / "conf" / "model" / "flash.yaml"))


def test_flash_takes_890_bytes_a_token(flash):
    layout = Layout(flash, "packed")
    assert layout.bytes_per_token == 890
    assert layout.page_bytes(torch.bfloat16) == 64 * 890
    assert layout.ring_row_bytes(torch.bfloat16) == 512 + 16
    assert Layout(flash, "plain").bytes_per_token == 890, "a figure of the model, whatever the storage"
    assert Layout(flash, "plain").page_bytes(torch.bfloat16) == 64 * 5 // 2 * 2 * (512 + 128)


@pytest.mark.parametrize("page_size", [64, 256])
@pytest.mark.parametrize("storage", FORMS)
def test_planes_tile_a_page(flash, storage, page_size):
    layout = Layout(flash, storage, page_size)
    ends = [0]
    for source in flash.kv_source_layer_ids:
        *planes, rows = layout.planes(source)
        assert rows == page_size // flash.compress_ratios[source]
        for first, units in zip(planes, layout.plane_units(source), strict=True):
            assert first == ends[-1]
            ends.append(first + units)
    assert ends[-1] == layout.stride


def test_packed_planes_start_on_64_bytes(flash):
    layout = Layout(flash, "packed")
    starts = [p for s in flash.kv_source_layer_ids for p in layout.planes(s)[:4]]
    assert [p % 64 for p in starts] == [0] * len(starts)


@pytest.mark.parametrize("page_size", [0, -64, 32, 96])
def test_page_size_must_be_a_multiple_of_64(page_size):
    with pytest.raises(ValueError, match=f"page_size must be a multiple of 64, got {page_size}"):
        Layout(config(), page_size=page_size)


def test_addresses():
    cfg = config((WINDOW, FULL2, REUSE, FULL2, FULL1), engram=(), stages=1)
    layout = Layout(cfg)
    at = layout.addresses()
    assert [int(a.ring) for a in at] == [i * cfg.ring_size for i in range(6)]
    assert [int(a.layer) for a in at] == list(range(6))
    assert [int(at[i].tail) for i in (1, 3)] == [0, layout.tail_depth] and layout.slot_tails == 2 * layout.tail_depth
    sources = [cfg.source_of(i) for i in range(6)]
    assert sources == [None, 1, 1, 3, 4, None]
    assert [a.planes.tolist() for a, s in zip(at, sources) if s is not None] == [
        layout.planes(s) for s in sources if s is not None
    ]
    with pytest.raises(ValueError, match=r"layer 2 owns no compressed KV; sources: \(1, 3, 4\)"):
        layout.planes(2)


@pytest.mark.parametrize("storage", FORMS)
def test_allocation(storage):
    cfg = config()
    layout = Layout(cfg, storage)
    cache = layout.allocate(pages=5, slots=3, dtype=torch.bfloat16)
    assert cache.pages.numel() * cache.pages.itemsize == 5 * layout.page_bytes(torch.bfloat16)
    rows = 3 * cfg.num_rings * (cfg.sliding_window + cfg.dspark_block_size)
    width = sum(row_bytes("fp8", cfg.head_dim)) if storage == "packed" else 2 * cfg.head_dim
    assert cache.rings.numel() * cache.rings.itemsize == rows * width
    assert cache.tails.shape == (3 * len(cfg.tail_sources) * (cfg.dspark_block_size + 2), 2 * cfg.head_dim)
    assert cache.load.shape == (cfg.num_rings, max(cfg.n_routed_experts, cfg.dspark_n_routed_experts) + 1)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_scratch_needs_room(sizes):
    with pytest.raises(ValueError, match=">= 2 pages and slots"):
        Layout(config()).allocate(*sizes, torch.float32)
