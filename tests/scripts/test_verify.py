"""The shipped golden cases pass, a changed one does not, and a missing file is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from scripts import verify
from scripts.build import Settings, build_settings
from scripts.entry import CONF, FULL_ERROR, entry, verbatim
from scripts.verify import SHIPPED_CASES, cases, verify_case
from tests.golden import write_case
from tests.small import FULL1, FULL2, REINDEX, REUSE, config, configs

FORMS = [("fp32", "plain"), ("qat", "plain"), ("qat", "packed")]


def settings(*overrides: str) -> Settings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_settings(compose("config", overrides=verbatim(["threads=1", *overrides])))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As the script sets it: products this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def case(tmp_path) -> Path:
    """A copy of the smaller case that a test may change."""
    return Path(shutil.copytree(SHIPPED_CASES / "tiny_batch", tmp_path / "case"))


def change(file: Path, name: str, by: float) -> None:
    tensors = load_file(file)
    tensors[name] = tensors[name] + by
    save_file(tensors, file)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["tiny_batch", "tiny_dspark"])
@pytest.mark.parametrize(("numerics", "cache"), FORMS)
def test_shipped_cases_pass(name, numerics, cache, capsys):
    results = verify_case(settings(f"numerics={numerics}", f"cache={cache}"), SHIPPED_CASES / name)
    table = capsys.readouterr().out
    assert results.failed == 0, table
    assert results.passed >= 12 and f"{name}: numerics={numerics} cache={cache}" in table
    assert ("packed = plain" in table) == (cache == "packed")
    assert ("draft ids" in table) == (name == "tiny_dspark")


def test_all_shipped_cases_are_found():
    assert [c.name for c in cases(None)] == ["tiny_batch", "tiny_dspark"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("numerics", "tensor", "by", "missed"),
    [
        ("fp32", "seq0.prefill.logits_all", 2e-3, {"logits_all", "chunked logits"}),
        ("fp32", "seq0.decode.0.logits", 2e-3, {"decode logits"}),
        ("qat", "seq0.prefill.layers.0.attn_out", 0.05, {"attn_out"}),
    ],
)
def test_a_changed_case_fails(case, numerics, tensor, by, missed, capsys):
    change(case / f"expected_{numerics}.safetensors", tensor, by)
    results = verify_case(settings(f"numerics={numerics}"), case)
    assert {row.tap for row in results.rows.values() if row.missed} == missed
    assert capsys.readouterr().out.count("MISS") == results.failed == len(missed)


@pytest.mark.medium
def test_a_miss_ends_with_exit_code_1(case, monkeypatch, capfd):
    change(case / "expected_fp32.safetensors", "seq0.prefill.logits_last", 1.0)
    monkeypatch.chdir(case)
    monkeypatch.setenv(FULL_ERROR, "")  # entry sets it; this puts it back
    monkeypatch.setattr("sys.argv", ["verify.py", f"golden={case}", "numerics=fp32", "threads=1"])
    with pytest.raises(SystemExit) as stop:
        entry(verify.run)
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert stop.value.code == 1 and result["failed"] == 1 and result["cases"] == 1


FILES = ["config.json", "weights.safetensors", "inputs.safetensors", "expected_fp32.safetensors", "engram_tables.json"]


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(case, file):
    (case / file).unlink()
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        verify_case(settings("numerics=fp32"), case)


def test_a_missing_folder_and_a_missing_input_are_named(case):
    with pytest.raises(ValueError, match="golden=no/where: no such folder"):
        cases("no/where")
    inputs = load_file(case / "inputs.safetensors")
    del inputs["seq0.prompt"]
    save_file(inputs, case / "inputs.safetensors")
    with pytest.raises(ValueError, match=r"inputs\.safetensors: tensor seq0\.prompt is missing"):
        verify_case(settings("numerics=fp32"), case)


def rename_inputs(tensors: dict) -> dict:
    return {k.replace("seq0", "other"): v for k, v in tensors.items()}


BAD_INPUTS = [
    (rename_inputs, "other has no expected values"),
    (lambda t: {}, "holds no tensors"),
    (lambda t: {k: v.float() for k, v in t.items()}, "must be integers"),
    (lambda t: {k: v[0] for k, v in t.items()}, "must be integers"),
    (lambda t: {k: v + 1000 for k, v in t.items()}, "holds ids outside"),
    (lambda t: {**t, "seq0.decode_inputs": t["seq0.decode_inputs"][:, :3]}, "the inputs have 3 decode steps"),
    (lambda t: {**t, "seq0.decode_inputs": t["seq0.decode_inputs"][:1]}, "decode inputs"),
    (lambda t: {**t, "seq0.prompt": t["seq0.prompt"][:, :5]}, "the prompts have 5"),
]


@pytest.mark.parametrize(("damage", "message"), BAD_INPUTS)
def test_inputs_that_fit_nothing_are_refused(damage, message, case):
    """Never a pass in which nothing was compared."""
    file = case / "inputs.safetensors"
    save_file({k: v.contiguous() for k, v in damage(load_file(file)).items()}, file)
    with pytest.raises(ValueError, match=message):
        verify_case(settings(), case)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "token_map must be a list of integers"),
        ("[0, 1]", "token_map has 2 tokens, config.json has vocab_size 128"),
        (str([127] * 128), "token_map has ids 127..127, config.json has engram_compressed_vocab_size"),
    ],
)
def test_a_wrong_token_map_is_refused(case, text, message):
    (case / "engram_tables.json").write_text(f'{{"token_map": {text}}}')
    with pytest.raises(ValueError, match=f"engram_tables.json: {message}"):
        verify_case(settings(), case)


def test_pages_too_large_are_refused(monkeypatch):
    monkeypatch.setattr(verify.memory, "available", lambda device: 10**10)
    with pytest.raises(ValueError, match=r"lower serve\.pages"):
        verify_case(settings("serve.page_size=6400000000"), SHIPPED_CASES / "tiny_batch")


# --- cases of other shapes, made by the dense forward ---

SHAPES = [  # name, config, (sequences, prompt tokens, decode tokens) of each set
    ("one token", {}, [(1, 1, 3), (3, 1, 2)]),
    ("two lengths, beyond the window", {}, [(1, 21, 2), (2, 5, 3)]),
    ("nothing decoded", {}, [(1, 9, 0)]),
    ("two streams, small heads", {"hc_mult": 2, "head_dim": 32, "index_head_dim": 32}, [(2, 19, 2)]),
    ("one stream, wide", {"hc_mult": 1, "hidden_size": 96, "num_attention_heads": 2, "index_n_heads": 1}, [(1, 18, 2)]),
    ("no drafter, no candidates", {"stages": 0, "candidates": False}, [(1, 17, 2)]),
    ("no Engram", {"engram": ()}, [(1, 17, 2)]),
    ("ratio 1 alone, a long n-gram", {"roles": (FULL1, REUSE), "engram": (0,), "ngram": 4, "taps": (1,)}, [(1, 30, 2)]),
    ("ratio 2 alone", {"roles": (FULL2, REINDEX), "engram": (), "taps": (0,), "stages": 1}, [(1, 30, 2)]),
]


@pytest.mark.parametrize(("changes", "sets"), [s[1:] for s in SHAPES], ids=[s[0] for s in SHAPES])
def test_cases_of_other_shapes_pass(changes, sets, tmp_path, capsys):
    folder = write_case(tmp_path, config(**changes), sets)
    results = verify_case(settings("numerics=fp32"), folder)
    table = capsys.readouterr().out
    assert results.failed == 0, table
    assert "not compared" not in table and "logits" in table


@pytest.mark.slow
@given(
    cfg=configs(),
    sets=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=2),
)
def test_cases_of_random_shapes_pass(cfg, sets, tmp_path_factory):
    results = verify_case(settings("numerics=fp32"), write_case(tmp_path_factory.mktemp("case"), cfg, sets))
    assert results.failed == 0 and not results.unread


# --- keys that nothing was compared with ---

LEFT_OUT = [  # key, whether leaving it out is a miss
    ("seq0.prefill.layers.99.attn_out", True),
    ("seq0.decode.0.spec.output_ids", True),  # the model has no drafter
    ("seq0.prefil.logits_all", False),
]


@pytest.fixture
def small_case(tmp_path) -> Path:
    return write_case(tmp_path, config((FULL1,), engram=(), stages=0), [(1, 3, 1)])


@pytest.mark.parametrize(("key", "missed"), LEFT_OUT)
def test_a_key_that_no_check_reads_is_told(small_case, key, missed, capsys):
    file = small_case / "expected_fp32.safetensors"
    save_file(load_file(file) | {key: torch.zeros(1, 3)}, file)
    results = verify_case(settings("numerics=fp32"), small_case)
    assert results.unread == [key] and results.failed == missed
    assert "not compared: seq0." in capsys.readouterr().out


def test_nothing_compared_is_a_miss(small_case, capsys):
    save_file({"seq0.unheard.of": torch.zeros(1)}, small_case / "expected_fp32.safetensors")
    results = verify_case(settings("numerics=fp32"), small_case)
    assert results.failed == 1 and "not compared: seq0.unheard.of" in capsys.readouterr().out


def test_values_for_a_set_without_inputs_are_refused(case):
    file = case / "expected_fp32.safetensors"
    save_file(load_file(file) | {"seq1.prefill.logits_last": torch.zeros(1, 128)}, file)
    with pytest.raises(ValueError, match=r"seq1\.prefill\.logits_last is for a set that has no inputs"):
        verify_case(settings("numerics=fp32"), case)


def test_replay_of_a_prompt_within_the_window_is_refused(case):
    file = case / "expected_fp32.safetensors"
    save_file(load_file(file) | {"seq0.replay_after_source.logits_last": torch.zeros(2, 128)}, file)
    with pytest.raises(ValueError, match="replay needs prompts longer than the window of 16, got 11"):
        verify_case(settings("numerics=fp32"), case)
