"""Several ranks behind scripts.run: processes of our own, and two nodes of torchrun, both on this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.mesh import ALONE, Seat
from scripts import seats
from scripts.build import ROOT

RANKS = ("parallel=dep", "parallel.axes.dp=2")
LOAD = ("workload=prompts", "workload.concurrency=4", "max_tokens=6", "track=none")
ENV = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def command(folder: Path, *more: str) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("def f(a):\nclass A:\nimport os\nx = 1\n")
    return ["-m", "scripts.run", *LOAD, f"prompt_file={prompts}", f"hydra.run.dir={folder}", *more]


def check(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    assert result["completed"] == 4 and result["output_tokens"] == 24 and not result["failed_requests"], result


@pytest.mark.medium
def test_processes_of_our_own(tmp_path):
    args = command(tmp_path, *RANKS, "parallel.engram=host", "parallel.dispatch=alltoall")
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    check(tmp_path)
    notes = [line for line in done.stderr.splitlines() if "Engram tables" in line]
    assert len(notes) == 2 and all(" kB of host memory, shared, " in note for note in notes), notes


@pytest.mark.medium
@pytest.mark.parametrize(
    "plan", [(*RANKS, "parallel.agree=gloo"), ("serve=disagg", "serve.rehearse=false")], ids=["dep", "disagg"]
)
def test_two_nodes_of_torchrun(plan, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir()
        where = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *where, f"--master-port={port}"]
        args = command(folder, *plan)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        made.append(subprocess.Popen([*torchrun, *args], cwd=ROOT, env=ENV, **pipes))
    try:
        said = [process.communicate(timeout=250)[0] for process in made]
    finally:
        for process in made:
            process.kill()
    assert [process.returncode for process in made] == [0, 0], said
    check(tmp_path / "0")
    assert not (tmp_path / "1" / "result.json").exists()


def test_a_seat_is_read_from_torchruns_environment(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert seats.seat() is ALONE and seats.device("cuda", ALONE) == "cuda:0"
    assert seats.device("cuda", Seat(1, 2, number=3)) == "cuda:3" and seats.device("cpu", Seat(3, 4)) == "cpu"
    seats.check(9)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert seats.seat() == Seat(5, 8) and seats.device("cuda", seats.seat()) == "cuda:1"
    seats.check(8)
    for engines in (2, 16):
        with pytest.raises(ValueError, match=f"torchrun started 8 ranks, and the plan has {engines} engines: start as"):
            seats.check(engines)
