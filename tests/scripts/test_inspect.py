"""`inspect`: Flash's published figures from shapes alone, and the parts add up to the whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from model import release, transformer, tree
from scripts import build, inspect, report

ROOT = Path(__file__).parents[2]


def figures(*overrides: str) -> dict:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=list(overrides))
    cfg = build.build_model_config(config.model)
    return inspect.inspect(cfg, build.build_plan(config.parallel, cfg))


@pytest.fixture(scope="module")
def flash() -> dict:
    return figures("model=flash", "parallel=dep", "parallel.axes.dp=32")


def test_published_figures(flash):
    assert flash["kv_bytes_per_token"] == 890
    assert flash["tensors"] == 96_085 - release.VISION_TENSORS
    billions = {k: round(v / 1e9) for k, v in flash.items() if k.startswith("parameters")}
    assert billions["parameters_backbone"] == 552
    assert billions["parameters_active_decode"] == 16
    assert billions["parameters_active_prefill"] == 8
    assert flash["window_bytes_per_sequence"] == 43 * (128 + 5) * (512 + 16)


def test_parts_add_up(flash):
    parts = ("backbone", "engram", "drafter")
    assert flash["parameters"] == sum(flash[f"parameters_{part}"] for part in parts)
    assert flash["bytes"] == sum(flash[f"bytes_{kind.lower()}"] for kind in release.TORCH)


def test_ranks_hold_their_share(flash):
    whole = figures("model=flash", "parallel=single")
    assert flash["ranks"] == 32 and whole["ranks"] == 1
    split = 43 * 3  # at most a row of an uneven table apart
    assert 0 <= flash["bytes_per_rank"] - flash["bytes_per_rank_min"] <= 32 * 2 * (256 + 8) + split
    assert whole["bytes_per_rank"] / 32 < flash["bytes_per_rank"] < whole["bytes_per_rank"] / 16


def test_tables_on_the_host_are_beside_the_ranks(flash):
    host = figures("model=flash", "parallel=dep", "parallel.axes.dp=32", "parallel.engram=host")
    assert host["bytes_host_per_node"] > 190e9 and not flash["bytes_host_per_node"]
    every = figures("model=flash", "parallel=dep", "parallel.axes.dp=32", "parallel.engram=replicate")
    assert every["bytes_per_rank"] == host["bytes_per_rank"] + host["bytes_host_per_node"]
    assert host["bytes_per_rank"] < flash["bytes_per_rank"]


def test_every_leaf_has_a_part_and_tables_print(flash, capsys):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=["model=tiny", "parallel=single"])
    cfg = build.build_model_config(config.model)
    groups = {inspect.group_of(path) for path, _ in tree.walk(transformer.specs(cfg))}
    assert groups == set(inspect.GROUPS)
    plan = build.build_plan(config.parallel, cfg)
    assert all(t.row_count for t in inspect.tables(cfg, plan, inspect.inspect(cfg, plan)))


def test_schema_check_sees_a_difference():
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = build.build_model_config(compose("config", overrides=["model=tiny"]).model)
    specs = dict(tree.walk(transformer.specs(cfg)))
    schema = release.schema(cfg)
    inspect.check_schema(specs, schema)
    name = "layers.0.ffn.experts.0.w1.weight"
    schema[name] = release.Entry(name, "BF16", schema[name].shape, schema[name].path, expert=0)
    with pytest.raises(
        ValueError, match=r"layers\.0\.block\.ffn\.experts\.w1: encodes to .* but the schema has .*bfloat16"
    ):
        inspect.check_schema(specs, schema)


def test_emit_prints_one_line_and_writes_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "run_folder", lambda: tmp_path)
    report.emit({"b": 1, "a": 2.5, "text": "x", "none": None})
    out = capsys.readouterr().out
    assert out == '{"b": 1, "a": 2.5, "text": "x", "none": null}\n'
    assert (tmp_path / "result.json").read_text() == out
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_emit_refuses_nan(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run_folder", lambda: tmp_path)
    with pytest.raises(ValueError):
        report.emit({"a": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.medium
def test_command_is_quick_and_small(tmp_path):
    """The whole command for Flash on 32 ranks: its last line is the result, below 2 GB and a minute of CPU time."""
    args = ["model=flash", "parallel=dep", "parallel.axes.dp=32", f"hydra.run.dir={tmp_path}"]
    with open(tmp_path / "stdout", "w") as out:
        child = subprocess.Popen([sys.executable, "-m", "scripts.inspect", *args], cwd=ROOT, stdout=out)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    result = json.loads((tmp_path / "stdout").read_text().splitlines()[-1])
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["kv_bytes_per_token"] == 890 and result["parameters"] > 7e11
    assert used.ru_utime + used.ru_stime < 60 and used.ru_maxrss < 2 * 10**6  # seconds, kB
