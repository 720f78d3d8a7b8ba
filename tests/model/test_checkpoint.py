"""Checkpoints: golden files survive load, save, load bit for bit; each rank reads its part; bad files are named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import checkpoint, release, transformer, tree
from model.config import ModelConfig
from model.tree import Quantized
from parallel import plan
from parallel.expert import first_plan
from parallel.hosttable import Node

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASES = ("tiny_batch", "tiny_dspark")
EXPERT = "layers.0.ffn.experts.1.w2"


def flat(params) -> dict[str, Tensor | None]:
    """Leaf tensors by path, weights and scales apart."""
    out = {}
    for path, leaf in tree.walk(params):
        out[path] = leaf.weight if isinstance(leaf, Quantized) else leaf
        if isinstance(leaf, Quantized):
            out[f"{path}#scale"] = leaf.scale
    return out


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def assert_same(a, b):
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    assert not [path for path in a if not same(a[path], b[path])]


@pytest.fixture
def case(tmp_path) -> Path:
    """A checkpoint folder that a test may damage."""
    shutil.copy(GOLDEN / "tiny_batch" / "config.json", tmp_path / "config.json")
    shutil.copy(GOLDEN / "tiny_batch" / "weights.safetensors", tmp_path / "model.safetensors")
    return tmp_path


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Rewrite the single shard with some tensors replaced, or dropped where None; ``__`` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, **kwargs):
    kwargs = {"numerics": "fp32", **kwargs}
    return checkpoint.load(folder, checkpoint.read_config(folder), **kwargs)


# --- what comes back ---


@pytest.mark.parametrize("weights", ["dense", "packed"])
@pytest.mark.parametrize("numerics", ["fp32", "qat"])
@pytest.mark.parametrize("name", CASES)
def test_load_save_load_is_bit_exact(name, numerics, weights, tmp_path):
    cfg = checkpoint.read_config(GOLDEN / name)
    first = checkpoint.load(GOLDEN / name / "weights.safetensors", cfg, numerics=numerics, weights=weights)
    checkpoint.save(tmp_path, cfg, first, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert checkpoint.read_config(tmp_path) == cfg
    assert_same(first, checkpoint.load(tmp_path, cfg, numerics=numerics, weights=weights))


@pytest.mark.parametrize("name", CASES)
def test_packed_files_are_rewritten_byte_for_byte(name, tmp_path):
    cfg = checkpoint.read_config(GOLDEN / name)
    source = load_file(GOLDEN / name / "weights.safetensors")
    params = checkpoint.load(GOLDEN / name / "weights.safetensors", cfg, numerics="qat", weights="packed")
    checkpoint.save(tmp_path, cfg, params)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == source.keys()
    assert not [k for k in source if not k.endswith("bias_vl") and not same(source[k], written[k])]


def test_dense_is_packed_dequantised_exactly():
    cfg = checkpoint.read_config(GOLDEN / "tiny_dspark")
    specs = dict(tree.walk(transformer.specs(cfg)))
    where = GOLDEN / "tiny_dspark" / "weights.safetensors"
    packed = dict(tree.walk(checkpoint.load(where, cfg, numerics="fp32", weights="packed")))
    for numerics, dtype in (("fp32", torch.float32), ("qat", torch.bfloat16)):
        for path, leaf in tree.walk(checkpoint.load(where, cfg, numerics=numerics)):
            spec = specs[path]
            if spec.rowwise:  # Engram tables stay as stored
                assert leaf.scale is not None and same(leaf.weight, packed[path].weight)
            elif isinstance(leaf, Quantized):
                want = release.decode(spec, packed[path].weight, packed[path].scale, torch.float32)
                assert leaf.scale is None and leaf.weight.dtype == dtype and torch.equal(leaf.weight.float(), want)
            else:
                assert leaf.dtype == (torch.float32 if spec.promote or spec.fmt == "f32" else dtype)


def test_expert_stack_holds_the_released_experts_in_order():
    cfg = checkpoint.read_config(GOLDEN / "tiny_batch")
    where = GOLDEN / "tiny_batch" / "weights.safetensors"
    stack = checkpoint.load(where, cfg, numerics="qat", weights="packed").layers[0].block.ffn.experts.w2
    source = load_file(where)
    assert stack.weight.shape[0] == cfg.n_routed_experts
    assert same(stack.weight[1], source[f"{EXPERT}.weight"]) and same(stack.scale[1], source[f"{EXPERT}.scale"])


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_ranks_of_a_plan_hold_the_whole_between_them(weights):
    cfg = checkpoint.read_config(GOLDEN / "tiny_batch")
    rules = [
        ["layers.*.block.ffn.experts.*", {"shard": 0, "axis": "ep"}],
        ["layers.*.engram.embed", {"shard": 0, "axis": "ep", "uneven": "ceil"}],
        ["layers.*.attn.wq_b", {"shard": 0, "axis": "ep"}],
        ["layers.*.attn.wo_b", {"shard": 1, "axis": "ep"}],
        ["*", "replicate"],
    ]
    two = plan.parse({"dp": 2, "ep": 2}, rules)
    shapes = {path: spec.shape for path, spec in tree.walk(transformer.specs(cfg))}
    two.check(shapes)
    for make in (
        lambda **kw: checkpoint.load(GOLDEN / "tiny_batch" / "weights.safetensors", cfg, **kw),
        lambda **kw: checkpoint.random(cfg, 3, **kw),
    ):
        whole = flat(make(numerics="qat", weights=weights))
        parts = [flat(make(numerics="qat", weights=weights, plan=two, rank=r)) for r in range(2)]
        for path, value in whole.items():
            leaf = path.removesuffix("#scale")
            cut = two.slice(leaf, shapes[leaf], two.coords(0))
            if cut is None or value is None:
                assert all(same(p[path], value) for p in parts)
            else:
                assert same(torch.cat([raw(p[path]) for p in parts], cut[0]), raw(value)), path


@pytest.mark.parametrize("make", ["load", "random"])
def test_a_table_on_the_host_is_read_once_and_equal(make, monkeypatch):
    monkeypatch.setattr(checkpoint, "HOST_ROWS", 50)
    cfg = checkpoint.read_config(GOLDEN / "tiny_batch")
    first = (GOLDEN / "tiny_batch" / "weights.safetensors", cfg) if make == "load" else (cfg, 3)
    how = plan.parse({"ep": 2}, [["layers.*.engram.embed", "host"], ["*", "replicate"]])
    store = dist.HashStore()
    nodes = [Node(store) for _ in range(2)]
    whole = flat(getattr(checkpoint, make)(*first, numerics="qat"))
    ranks = [flat(getattr(checkpoint, make)(*first, numerics="qat", plan=how, node=node)) for node in nodes]
    assert all(same(rank[path], value) for rank in ranks for path, value in whole.items())
    assert [n.first for n in nodes] == [True, False] and set(nodes[0].pages) == set(nodes[1].pages)
    assert len(nodes[0].pages) == 2 * len(cfg.engram_layer_ids)
    wrong = plan.parse({"ep": 2}, [["embed", "host"], ["*", "replicate"]])
    with pytest.raises(ValueError, match="'embed' is no table of rows; only those can be placed on the host"):
        getattr(checkpoint, make)(*first, numerics="qat", plan=wrong)


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_redundant_slots_hold_second_replicas(weights):
    cfg = checkpoint.read_config(GOLDEN / "tiny_batch")
    e = cfg.n_routed_experts
    two = plan.parse({"ep": 2}, [["layers.*.experts.*", {"shard": 0, "axis": "ep"}], ["*", "replicate"]])
    for make in (
        lambda **kw: checkpoint.load(GOLDEN / "tiny_batch" / "weights.safetensors", cfg, **kw),
        lambda **kw: checkpoint.random(cfg, 3, **kw),
    ):
        whole = flat(make(numerics="qat", weights=weights))
        parts = [flat(make(numerics="qat", weights=weights, plan=two, rank=r, redundant=2)) for r in range(2)]
        slots = first_plan(e, 2, 2)
        assert len(slots) == e + 2 and slots[e // 2] == e // 2 and slots[-1] == 0
        for path, value in whole.items():
            if ".experts." in path and value is not None:
                assert same(torch.cat([raw(p[path]) for p in parts]), raw(value)[slots]), path


def test_a_rank_reads_only_its_part(monkeypatch):
    c = cfg(GOLDEN / "tiny_dspark")
    rules = [["layers.*.experts.*", {"shard": 0, "axis": "ep", "uneven": "ceil"}], ["*", "replicate"]]
    four = plan.parse({"ep": 4}, rules)  # 6 experts: 2, 2, 2, 0
    seen: list[str] = []
    read = checkpoint.Shards.read
    monkeypatch.setattr(checkpoint.Shards, "read", lambda self, name, cut: seen.append(name) or read(self, name, cut))
    where = GOLDEN / "tiny_dspark" / "weights.safetensors"
    params = checkpoint.load(where, c, numerics="qat", weights="packed", plan=four, rank=1)
    experts = {int(n.split(".")[4]) for n in seen if ".experts." in n and n.startswith("layers.")}
    assert experts == {2, 3} and len(seen) == len(set(seen))
    assert params.layers[0].block.ffn.experts.w1.weight.shape[0] == 2
    none = checkpoint.load(where, c, numerics="qat", plan=four, rank=3).layers[0].block.ffn.experts.w1.weight
    assert none.shape == (0, c.moe_intermediate_size, c.hidden_size)


def test_cut_inside_a_block_is_refused():
    cfg = checkpoint.read_config(GOLDEN / "tiny_batch")
    size = dict(tree.walk(transformer.specs(cfg)))["layers.0.block.attn.wkv"].shape[0] // 16
    tiny = plan.parse({"ep": size}, [["layers.0.block.attn.wkv", {"shard": 0, "axis": "ep"}], ["*", "replicate"]])
    with pytest.raises(ValueError, match=r"layers\.0\.block\.attn\.wkv: dim 0 .* inside a group of 32"):
        checkpoint.random(cfg, 0, numerics="qat", plan=tiny, rank=1)


def test_random_model_could_have_come_from_a_file(tmp_path):
    cfg = checkpoint.read_config(GOLDEN / "tiny_batch")
    checkpoint.save(tmp_path, cfg, checkpoint.random(cfg, 5, numerics="qat", weights="packed"))
    for weights in ("dense", "packed"):
        made = checkpoint.random(cfg, 5, numerics="qat", weights=weights)
        assert_same(made, checkpoint.load(tmp_path, cfg, numerics="qat", weights=weights))
    other = flat(checkpoint.random(cfg, 6, numerics="qat"))
    assert not same(other["embed"], flat(made)["embed"])


def test_write_release_rounds_values_by_name(tmp_path):
    cfg = checkpoint.read_config(GOLDEN / "tiny_batch")
    specs = dict(tree.walk(transformer.specs(cfg)))
    values = {}
    for entry in release.schema(cfg).values():
        if entry.part == "weight":
            values[entry.name] = tree.draw(release.one(specs[entry.path]), 1, entry.name)
    checkpoint.write_release(tmp_path, values, cfg)
    got = checkpoint.load(tmp_path, cfg, numerics="fp32")
    want = release.encode(release.one(specs["layers.0.block.ffn.experts.w2"]), values[f"{EXPERT}.weight"])
    want = release.decode(specs["layers.0.block.ffn.experts.w2"], *want, torch.float32)
    assert torch.equal(got.layers[0].block.ffn.experts.w2.weight[1], want)
    assert torch.equal(got.embed, values["embed.weight"].bfloat16().float())


def test_a_smaller_save_leaves_no_shard_of_the_larger_one(tmp_path):
    cfg = checkpoint.read_config(GOLDEN / "tiny_batch")
    for size in (100_000, 10**9, 100_000):
        checkpoint.save(tmp_path, cfg, checkpoint.random(cfg, size, numerics="qat"), shard_bytes=size)
        assert_same(load(tmp_path, numerics="qat"), checkpoint.random(cfg, size, numerics="qat"))
    assert sorted(p.suffix for p in tmp_path.iterdir() if p.name.startswith("model.")) == [".json"]


def test_vision_tensors_and_image_biases_are_skipped_by_name(case):
    names = ("vision__a__weight", "aligner__b", "image_start", "image_newline")
    edit(case, **{n: torch.zeros(1) for n in names}, layers__0__ffn__gate__bias_vl=None)
    assert_same(load(case), checkpoint.load(GOLDEN / "tiny_batch" / "weights.safetensors", cfg(case), numerics="fp32"))


def cfg(folder: Path) -> ModelConfig:
    return checkpoint.read_config(folder)


# --- bad input: each names the file and the tensor ---


@pytest.mark.parametrize("keep", [4, 40, 5000, -1], ids=["length", "header", "data", "last byte"])
def test_truncated_shard(case, keep):
    path = case / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or corrupt"):
        load(case)


def test_corrupt_header(case):
    path = case / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff{[}"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or corrupt"):
        load(case)


def test_a_pickle_is_not_opened(case):
    (case / "model.safetensors").unlink()
    torch.save({"embed.weight": torch.zeros(2)}, case / "model.bin")
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors\.index\.json nor a \.safetensors file"):
        load(case)
    shutil.copy(case / "model.bin", case / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or corrupt"):
        load(case)


@pytest.mark.parametrize("name", ["embed.weight", f"{EXPERT}.weight", f"{EXPERT}.scale", "layers.0.attn.wo_a.scale"])
def test_missing_tensor(case, name):
    edit(case, **{name.replace(".", "__"): None})
    with pytest.raises(ValueError, match=f"tensor '{name}' is missing"):
        load(case)


@pytest.mark.parametrize("name", ["layers.0.attn.wq_c.weight", "layers.99.attn_norm.weight", "lm_head.weight"])
def test_extra_tensor(case, name):
    edit(case, **{name.replace(".", "__"): torch.zeros(3)})
    with pytest.raises(ValueError, match=rf"model\.safetensors: unknown tensor '{name}'"):
        load(case)


def test_wrong_shape(case):
    edit(case, norm__weight=torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(
        ValueError, match=r"model\.safetensors: tensor 'norm\.weight' must have shape \(\d+,\).*got \(3,\)"
    ):
        load(case)


def test_wrong_shape_by_config(case):
    root = json.loads((case / "config.json").read_text())
    root["text_config"]["moe_intermediate_size"] *= 2
    (case / "config.json").write_text(json.dumps(root))
    with pytest.raises(ValueError, match=r"must have shape .* by config\.json"):
        load(case)


def test_wrong_dtype(case):
    weights = load_file(case / "model.safetensors")
    edit(case, norm__weight=weights["norm.weight"].float())
    with pytest.raises(ValueError, match=r"tensor 'norm\.weight' must be BF16, got F32"):
        load(case)
    edit(case, norm__weight=weights["norm.weight"])
    edit(case, **{f"{EXPERT}.scale".replace(".", "__"): weights[f"{EXPERT}.scale"].view(torch.uint8)})
    with pytest.raises(ValueError, match=rf"tensor '{EXPERT}\.scale' must be F8_E8M0, got U8"):
        load(case)


@pytest.mark.parametrize(
    "name",
    [
        f"{EXPERT}.scale",
        "layers.0.attn.wkv.scale",
        "layers.0.attn.wkv.weight",
        "layers.0.attn.attn_sink",
        "norm.weight",
    ],
)
@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_nan(case, name, weights):
    value = load_file(case / "model.safetensors")[name]
    if value.dtype == torch.float8_e8m0fnu:
        value.view(torch.uint8).view(-1)[-1] = 0xFF
    elif value.dtype == torch.float8_e4m3fn:
        value.view(torch.uint8).view(-1)[-1] = 0x7F
    else:
        value.view(-1)[-1] = float("nan")
    edit(case, **{name.replace(".", "__"): value})
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor '{name}' holds NaN or infinity"):
        load(case, weights=weights)


def test_bad_headers_are_found_before_any_tensor_is_read(case, monkeypatch):
    edit(case, mtp__9__norm__weight=torch.zeros(1))
    monkeypatch.setattr(checkpoint.Shards, "read", lambda *a: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match="unknown tensor"):
        load(case)


def sharded(case: Path) -> Path:
    params = load(case, weights="packed")
    checkpoint.save(case, cfg(case), params, shard_bytes=100_000)
    return case / "model.safetensors.index.json"


def test_index_that_names_a_missing_file(case):
    sharded(case)
    (case / "model-00002-of-00011.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"index\.json: names model-00002-of-00011\.safetensors \(for '.*'\), which is not"
    ):
        load(case)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "'weight_map' must be an object"),
        ('{"weight_map": {"embed.weight": 3}}', "'weight_map' must be an object of tensor name -> file name"),
        ('{"weight_map": {"embed.weight": "../x.safetensors"}}', "must name files of its own folder, got '../x"),
        ('{"weight_map": {}}', "tensor 'embed.weight' is missing"),
    ],
)
def test_bad_index(case, text, message):
    sharded(case).write_text(text)
    with pytest.raises(ValueError, match=message):
        load(case)


def move(index: dict[str, str]) -> None:
    index["norm.weight"] = next(file for file in sorted(set(index.values())) if file != index["norm.weight"])


SHARD = r"model-\d+-of-\d+\.safetensors"
SAYS = rf"index\.json: says that {SHARD} holds tensor"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: index.pop("norm.weight"), rf"{SHARD}: holds tensor 'norm.weight', which .*index\.json does not"),
        (move, rf"{SAYS} 'norm.weight', but {SHARD} does"),
        (lambda index: index.update({"norm.bias": index["norm.weight"]}), f"{SAYS} 'norm.bias', but no file does"),
    ],
    ids=["not listed", "moved", "not held"],
)
def test_index_and_headers_must_agree(case, damage, message):
    path = sharded(case)
    (case / "model.safetensors").unlink(missing_ok=True)
    index = json.loads(path.read_text())
    damage(index["weight_map"])
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        load(case)


def test_tensor_in_two_shards(case):
    shutil.copy(case / "model.safetensors", case / "model2.safetensors")
    with pytest.raises(ValueError, match=r"model2\.safetensors: tensor '.*' is in model\.safetensors too"):
        load(case)


def test_no_such_folder(case):
    with pytest.raises(ValueError, match="nowhere: no such checkpoint folder"):
        checkpoint.load(case / "nowhere", cfg(case), numerics="fp32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config\.json: cannot be read"),
        ("{'a': 1}", r"config\.json: not valid JSON"),
        ("3", r"config\.json: must hold a JSON object, got int"),
        ("{}", r"config\.json: 'text_config' is missing"),
    ],
)
def test_bad_config_file(case, text, message):
    path = case / "config.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(case)


def test_config_error_names_file_and_field(case):
    root = json.loads((case / "config.json").read_text())
    root["text_config"]["head_dim"] = 63
    (case / "config.json").write_text(json.dumps(root))
    with pytest.raises(ValueError, match=rf"{case}/config\.json: head_dim must be a multiple of 32.*got 63"):
        load(case)


def test_unknown_choices(case):
    with pytest.raises(ValueError, match=r"numerics must be one of .*got 'bf16'"):
        load(case, numerics="bf16")
    with pytest.raises(ValueError, match=r"weights must be one of .*got 'sparse'"):
        load(case, weights="sparse")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, "tensor 'norm.weight' is missing"),
        ({"norm.bias": torch.zeros(1)}, "tensor 'norm.bias' is unknown"),
        ({"norm.weight": torch.zeros(3)}, r"tensor 'norm.weight' must have shape \(64,\), got \(3,\)"),
        ({"norm.weight": torch.full((64,), float("inf"))}, "tensor 'norm.weight' holds NaN or infinity"),
        ({f"{EXPERT}.weight": torch.full((64, 32), float("nan"))}, rf"tensor '{EXPERT}.weight' holds NaN"),
    ],
)
def test_write_release_refuses(change, message, tmp_path):
    c = cfg(GOLDEN / "tiny_batch")
    specs = dict(tree.walk(transformer.specs(c)))
    entries = [e for e in release.schema(c).values() if e.part == "weight"]
    values = {e.name: torch.zeros(release.one(specs[e.path]).shape) for e in entries}
    for name, value in change.items():
        values.pop(name, None)
        if value is not None:
            values[name] = value
    with pytest.raises(ValueError, match=message):
        checkpoint.write_release(tmp_path, values, c)
    assert not (tmp_path / "config.json").exists()
