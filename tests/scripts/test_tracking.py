"""What wandb is given: read back from the files of offline runs."""

import json
import struct
import sys
import time
from pathlib import Path

import pytest

from scripts import report, tracking
from scripts.tracking import Run, Track
from tests.scripts.test_entry import start

BLOCK, HEADER = 32768, 7  # of a .wandb file, which is a LevelDB log


def records(folder: Path) -> list:
    """The records of the one offline run below ``folder``."""
    from wandb.proto import wandb_internal_pb2 as proto

    [path] = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, part, out = path.read_bytes(), HEADER, b"", []
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if at + HEADER + size > len(data):
            break  # still being written
        part += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            out.append(proto.Record())
            out[-1].ParseFromString(part)
            part = b""
    return out


def read(folder: Path, wait_s: float = 60.0) -> dict:
    """Config, summary, history rows, files, group, job type and exit code of an offline run. wandb's own process writes
    the file and may be behind the script's: the exit code comes last."""
    end = time.monotonic() + wait_s
    while "exit" not in (out := told(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    return out


def told(folder: Path) -> dict:
    """What the file of an offline run holds by now."""
    out = {"config": {}, "summary": {}, "history": [], "files": []}
    items = lambda entries: {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in entries}  # noqa: E731
    for r in records(folder):
        kind = r.WhichOneof("record_type")
        if kind == "run":
            out["config"] |= items(r.run.config.update)
            out |= {"group": r.run.run_group, "kind": r.run.job_type, "name": r.run.display_name}
            out |= {"project": r.run.project, "tags": list(r.run.tags)}
        elif kind == "summary":
            out["summary"] |= items(r.summary.update)
        elif kind == "history":
            out["history"].append(items(r.history.item))
        elif kind == "files":
            out["files"] += [f.path for f in r.files.files]
        elif kind == "exit":
            out["exit"] = r.exit.exit_code
    return out


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


def test_a_run_of_any_script_is_tracked(offline, monkeypatch, tmp_path, capsys):
    """Config, commit, result, history, table and plot, through the whole of `entry`."""

    def run(s):
        folder = report.run_folder()
        (folder / "steps.jsonl").write_text('{"loss": 2.5, "phase": "a"}\n{"loss": 1.5}\n{"lo')
        report.table("parts", ("part", "share"), [("a", 0.25), ("b", None)])
        with report.plot("curve") as [ax]:
            ax.plot([1, 2])
        return {"score": 0.5, "note": "fine"}

    start(monkeypatch, tmp_path, run, "seed=7", "track.tags=[one]")
    [folder] = tmp_path.glob("outputs/*/*/*")
    got = read(folder)
    assert got["config"]["seed"] == 7 and got["config"]["track"]["mode"] == "offline"
    assert got["config"]["git_commit"] == tracking.commit()["git_commit"] and "git_dirty" in got["config"]
    assert got["summary"]["score"] == 0.5 and got["summary"]["note"] == "fine"
    assert [h["steps/loss"] for h in got["history"] if "steps/loss" in h] == [2.5, 1.5]
    assert {Path(f).name.split("_")[0] for f in got["files"] if "media" in f} == {"parts", "curve"}
    assert (got["project"], got["tags"], got["group"], got["exit"]) == ("racklab", ["one"], "", 0)
    assert got["name"].endswith("seed=7 track.tags=[one]")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["score"] == 0.5


def test_a_failed_run_is_marked(offline, tmp_path):
    with pytest.raises(ValueError), tracking.track(Track("offline", "p", ()), Run("run", "r", "g", {}), tmp_path):
        raise ValueError("no")
    assert read(tmp_path)["exit"] == 1 and read(tmp_path)["group"] == "g"


@pytest.mark.parametrize(("mode", "variable"), [("disabled", "offline"), ("offline", "disabled")])
def test_nothing_where_it_is_off(mode, variable, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    with tracking.track(Track(mode, "p", ()), Run("run", "r", None, {}), tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_tables_and_histories_come_back(tmp_path):
    report.write_csv(tmp_path / "t.csv", ("a", "b", "c"), [(1, "x", None), (2.5, "3", 4)])
    assert tracking.table(tmp_path / "t.csv") == (["a", "b", "c"], [[1.0, "x", None], [2.5, "3", 4.0]])
    (tmp_path / "h.jsonl").write_text("\n".join(json.dumps({"i": i, "ok": True}) for i in range(25_000)))
    rows = [r["h/i"] for r in tracking.history(tmp_path / "h.jsonl")]
    assert rows == list(range(0, 25_000, 3))


def test_a_commit_of_no_checkout_is_none(tmp_path):
    assert tracking.commit(tmp_path) == {"git_commit": None, "git_dirty": None}


@pytest.mark.parametrize(("change", "message"), [({"mode": "on"}, "track.mode must be"), ({"project": ""}, "empty")])
def test_what_track_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        Track(**{"mode": "offline", "project": "p", "tags": (), **change})
