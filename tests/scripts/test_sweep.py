"""Sweeps: one table of all jobs, failed ones too, and the other jobs go on."""

import csv
import json

import pytest

from scripts import report, sweep
from tests.scripts.test_entry import start
from tests.scripts.test_tracking import offline, read  # noqa: F401  (a fixture)


def job(s):
    if s.seed == 2:
        raise ValueError("seed=2 is\nunlucky")
    if s.seed == 3:
        raise RuntimeError("a bug")
    return {"score": s.seed / 2, "same": 1, "flag": True, "failed": int(s.seed == 4)}


def run_sweep(monkeypatch, tmp_path, *argv, code=0):
    if code:
        with pytest.raises(SystemExit) as end:
            start(monkeypatch, tmp_path, job, "-m", *argv)
        assert end.value.code == code
    else:
        start(monkeypatch, tmp_path, job, "-m", *argv)
    [folder] = tmp_path.glob("outputs/*/*/*")
    return folder


def test_two_jobs_make_one_table(monkeypatch, tmp_path, capsys):
    folder = run_sweep(monkeypatch, tmp_path, "seed=10,9", "max_tokens=5")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["jobs"] == 2 and last["failed"] == 0 and (tmp_path / last["summary"]) == folder / "summary.json"
    made = json.loads((folder / "summary.json").read_text())
    assert made["swept"] == ["seed"] and [r["swept"]["seed"] for r in made["rows"]] == [10, 9]
    with open(folder / "summary.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(r["seed"], r["score"], r["same"], r["status"]) for r in table] == [
        ("10", "5.0", "1", "done"),
        ("9", "4.5", "1", "done"),
    ]
    assert (folder / "summary.png").stat().st_size > 1000
    assert {p.name for p in folder.glob("*/result.json")} and (folder / "1" / "config.yaml").is_file()


def test_a_failed_job_keeps_its_row(monkeypatch, tmp_path, capsys):
    folder = run_sweep(monkeypatch, tmp_path, "seed=1,2,3,4", code=1)
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert [r["status"] for r in rows] == ["done", "failed", "failed", "failed"]
    assert [r["error"] for r in rows] == [None, "seed=2 is unlucky", "RuntimeError: a bug", "failed=1"]
    assert rows[3]["result"]["score"] == 2.0 and rows[1]["result"] == {}
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["failed"] == 3
    assert "error: job 1: seed=2 is unlucky" in err and "Traceback" in err


def test_jobs_are_wandb_runs_of_one_group(offline, monkeypatch, tmp_path):  # noqa: F811
    folder = run_sweep(monkeypatch, tmp_path, "seed=5,6")
    jobs = [read(folder / str(i)) for i in range(2)]
    assert [j["summary"]["score"] for j in jobs] == [2.5, 3.0] and [j["config"]["seed"] for j in jobs] == [5, 6]
    whole = read(folder)
    assert {j["group"] for j in jobs} == {whole["group"]} and whole["group"].endswith(folder.name)
    assert whole["kind"] == "sweep" and any("summary" in f for f in whole["files"])


def rows(*swept, **results):
    return [
        {"job": i, "swept": s, "status": "done", "result": {k: v[i] for k, v in results.items()}}
        for i, s in enumerate(swept)
    ]


def test_metrics_are_numbers_that_differ():
    jobs = rows({"a": 1}, {"a": 2}, a=[1, 2], x=[5, 6], same=[1, 1], name=["p", "q"], ok=[True, False])
    assert sweep.metrics(jobs) == ["x"]
    assert sweep.metrics(jobs[:1]) == ["x", "same"]


def test_the_key_with_most_values_is_the_axis():
    jobs = rows(*({"kernels": k, "batch": b} for k in ("x", "y") for b in (1, 2, 3)))
    x, lines = sweep.series(jobs)
    assert x == "batch" and {k: len(v) for k, v in lines.items()} == {"kernels=x": 3, "kernels=y": 3}


def test_values_as_typed():
    assert [sweep.value(v) for v in ("3", "-2", "0.5", "1e3", "x", None)] == [3, -2, 0.5, 1000.0, "x", None]
    assert sweep.overrides(["+a.b=c=d", "seed=1"]) == {"a.b": "c=d", "seed": "1"}


def test_a_metric_that_no_job_has(tmp_path, monkeypatch):
    jobs = [{"error": None, **r} for r in rows({"a": 1}, {"a": 2}, x=[1, 2])]
    monkeypatch.setattr(sweep, "rows", lambda folder: jobs)
    with pytest.raises(ValueError, match="no job has 'y'; results: x"):
        sweep.summarise(tmp_path, ["y"])
    assert (tmp_path / "summary.csv").is_file()
    assert sweep.summarise(tmp_path, ["x"])["jobs"] == 2


def test_printed_cells():
    assert [report.shown(v) for v in (None, True, 12345, 0.123456, 12345.67, "a")] == [
        "-", "True", "12,345", "0.1235", "12,345.7", "a",
    ]  # fmt: skip
