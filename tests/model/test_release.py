"""The released layout: the schema is the release's own table (spec section 11), and the golden files obey it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors import safe_open

from model import checkpoint, release, transformer, tree
from model.config import QUANTIZATION, ModelConfig
from model.tree import Spec

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
RELEASED_TENSORS = 96_085  # in 48 shards, vision included


def config(name: str) -> ModelConfig:
    """conf/model/NAME.yaml read as a released text_config: its keys are DeepSeek's."""
    text: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml"))
    return ModelConfig.from_hf({"text_config": text, "quantization_config": QUANTIZATION})


@pytest.fixture(scope="module")
def flash() -> dict[str, release.Entry]:
    return release.schema(config("flash"))


def test_counts_to_the_released_number(flash):
    assert len(flash) == RELEASED_TENSORS - release.VISION_TENSORS
    assert sum(e.part == "ignored" for e in flash.values()) == 43


ROWS = [  # name, type, shape, how many tensors have that name with some layer, stage or expert number
    ("embed.weight", "BF16", (129280, 5120), 1),
    ("head.weight", "BF16", (129280, 5120), 1),
    ("norm.weight", "BF16", (5120,), 1),
    ("layers.#.attn_norm.weight", "BF16", (5120,), 40),
    ("layers.#.hc_attn_fn", "F32", (24, 20480), 40),
    ("layers.#.hc_ffn_base", "F32", (24,), 40),
    ("layers.#.hc_ffn_scale", "F32", (3,), 40),
    ("layers.#.attn.attn_sink", "F32", (64,), 40),
    ("layers.#.attn.wq_a.weight", "F8_E4M3", (1280, 5120), 40),
    ("layers.#.attn.wq_a.scale", "F8_E8M0", (40, 160), 40),
    ("layers.#.attn.wq_b.weight", "F8_E4M3", (32768, 1280), 40),
    ("layers.#.attn.wkv.scale", "F8_E8M0", (16, 160), 40),
    ("layers.#.attn.wo_a.weight", "F8_E4M3", (8192, 4096), 40),
    ("layers.#.attn.wo_b.weight", "F8_E4M3", (5120, 8192), 40),
    ("layers.#.attn.compressor.wkv.weight", "BF16", (512, 5120), 4),
    ("layers.#.attn.compressor.wgate.weight", "BF16", (512, 5120), 3),
    ("layers.#.attn.compressor.norm.weight", "BF16", (512,), 4),
    ("layers.#.attn.indexer.wk.weight", "BF16", (128, 512), 4),
    ("layers.#.attn.indexer.k_norm.weight", "BF16", (128,), 4),
    ("layers.#.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280), 8),
    ("layers.#.attn.indexer.weights_proj.weight", "BF16", (32, 5120), 8),
    ("layers.#.ffn.gate.weight", "BF16", (384, 5120), 40),
    ("layers.#.ffn.gate.bias", "F32", (384,), 40),
    ("layers.#.ffn.gate.bias_vl", "F32", (384,), 40),
    ("layers.#.ffn.experts.#.w1.weight", "I8", (2304, 2560), 40 * 384),
    ("layers.#.ffn.experts.#.w1.scale", "F8_E8M0", (2304, 160), 40 * 384),
    ("layers.#.ffn.experts.#.w2.weight", "I8", (5120, 1152), 40 * 384),
    ("layers.#.ffn.experts.#.w2.scale", "F8_E8M0", (5120, 72), 40 * 384),
    ("layers.#.ffn.shared_experts.w2.weight", "F8_E4M3", (5120, 2304), 40),
    ("layers.#.engram.wkv.weight", "F8_E4M3", (25600, 6144), 2),
    ("layers.#.engram.q_weight", "BF16", (4, 5120), 2),
    ("mtp.#.attn.wq_a.weight", "F8_E4M3", (1280, 5120), 3),
    ("mtp.#.ffn.gate.weight", "BF16", (128, 5120), 3),
    ("mtp.#.ffn.gate.bias_vl", "F32", (128,), 3),
    ("mtp.#.ffn.experts.#.w3.weight", "I8", (2304, 2560), 3 * 128),
    ("mtp.#.main_proj.weight", "F8_E4M3", (5120, 15360), 1),
    ("mtp.#.main_norm.weight", "BF16", (5120,), 1),
    ("mtp.#.norm.weight", "BF16", (5120,), 1),
    ("mtp.#.markov_head.embed.weight", "BF16", (129280, 256), 1),
    ("mtp.#.markov_head.head.weight", "BF16", (129280, 256), 1),
    ("mtp.#.confidence_head.proj.weight", "BF16", (1, 5376), 1),
]


def anonymous(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def test_rows_of_the_released_table(flash):
    found: dict[str, list[release.Entry]] = {}
    for entry in flash.values():
        found.setdefault(anonymous(entry.name), []).append(entry)
    for name, dtype, shape, count in ROWS:
        got = found.get(name, [])
        assert {(e.dtype, e.shape) for e in got} == {(dtype, shape)}, name
        assert len(got) == count, name


def test_engram_tables_and_stages_have_their_own_rows(flash):
    assert flash["layers.1.engram.embed.weight"].shape == (384006168, 256)
    assert flash["layers.14.engram.embed.scale"].shape == (384016682, 8)
    assert "mtp.0.main_proj.scale" in flash and "mtp.2.main_proj.scale" not in flash
    assert "mtp.2.norm.weight" in flash and "mtp.0.norm.weight" not in flash


def test_released_bytes(flash):
    assert round(sum(e.nbytes for e in flash.values()) / 1e9) == 509


@pytest.mark.parametrize("case", ["tiny_batch", "tiny_dspark"])
def test_golden_files_have_the_names_types_and_shapes(case):
    schema = release.schema(checkpoint.read_config(GOLDEN / case))
    with safe_open(GOLDEN / case / "weights.safetensors", "pt") as f:
        stored = {n: (f.get_slice(n).get_dtype(), tuple(f.get_slice(n).get_shape())) for n in f.keys()}
    assert stored == {e.name: (e.dtype, e.shape) for e in schema.values()}


def test_skips_by_name():
    for name in ("vision.blocks.0.w", "aligner.x", "image_start", "image_newline", "layers.3.ffn.gate.bias_vl"):
        assert release.skipped(name)
    for name in ("layers.3.ffn.gate.bias", "visionary", "embed.weight", "layers.3.vision.w"):
        assert not release.skipped(name)


@pytest.mark.parametrize("name", ["flash", "tiny"])
def test_encoding_makes_what_the_schema_says(name):
    distinct = {spec: path for path, spec in tree.walk(transformer.specs(config(name)))}
    for spec, path in distinct.items():
        made = release.encode(release.one(spec), torch.empty(release.one(spec).shape, device="meta"))
        wanted = list(itertools.islice(release.entries(path, spec), 2 if spec.scale_shape else 1))
        got = [(tuple(t.shape), str(t.dtype)) for t in made if t is not None]
        assert got == [(e.shape, str(release.TORCH[e.dtype])) for e in wanted], path


@pytest.mark.parametrize(
    ("spec", "cut", "weight", "scale"),
    [
        (Spec((96, 64), "fp8"), (0, 32, 64), (0, 32, 64), (0, 1, 2)),
        (Spec((70, 64), "fp8"), (0, 64, 70), (0, 64, 70), (0, 2, 3)),
        (Spec((96, 64), "fp8"), (1, 32, 64), (1, 32, 64), (1, 1, 2)),
        (Spec((9, 64), "fp8", rowwise=True), (0, 3, 6), (0, 3, 6), (0, 3, 6)),
        (Spec((8, 32, 64), "fp4"), (0, 2, 4), (0, 2, 4), (0, 2, 4)),
        (Spec((8, 32, 64), "fp4"), (2, 32, 64), (2, 16, 32), (2, 1, 2)),
        (Spec((8, 32, 64), "fp4"), (1, 5, 6), (1, 5, 6), (1, 5, 6)),
    ],
)
def test_cuts_of_stored_parts(spec, cut, weight, scale):
    assert release.stored_cut("p", spec, cut, "weight") == weight
    assert release.stored_cut("p", spec, cut, "scale") == scale


@pytest.mark.parametrize(("spec", "cut"), [(Spec((96, 64), "fp8"), (0, 16, 32)), (Spec((8, 64), "fp4"), (1, 0, 8))])
def test_cut_inside_a_group(spec, cut):
    with pytest.raises(ValueError, match=r"p: dim \d of shape .* inside a group of 32"):
        release.stored_cut("p", spec, cut, "scale")
