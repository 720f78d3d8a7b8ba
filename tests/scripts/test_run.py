"""The command that plays workloads, against an engine without a model and against a server that is not there."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from scripts import build, report, run
from scripts.build import build_settings
from scripts.entry import CONF, verbatim
from scripts.running import requests, show
from scripts.serving import engine as serving
from serve.load import synthetic
from serve.text import Text
from tests.serve.fake import FakeEngine, babble
from tests.serve.load.writers import write_azure

QUICK = ("workload.duration_s=0.3", "workload.drain_s=5", "workload.limit=6")


class Pausing(FakeEngine):
    """`FakeEngine` behind the engine's own `run`."""

    async def run(self, pause) -> None:
        while True:
            self.step()
            await pause()


@cache
def base():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_settings(compose("config", overrides=["track=none"]))


def settings(*overrides: str):
    """Settings of the workload's keys and a few of the root's, the rest built once."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = compose("config", overrides=verbatim([*QUICK, *overrides]))
    root = {key: made[key] for key in ("target", "prompt", "max_tokens")}
    return replace(base(), workload=build.build_workload(OmegaConf.to_container(made.workload)), **root)


@cache
def text():
    return Text.load(build.SHIPPED)


@pytest.fixture(autouse=True)
def engine(monkeypatch, tmp_path):
    made = []

    def make(s, mail, *_):
        made.append(Pausing(mail, babble(2048)))
        return made[-1], None

    monkeypatch.setattr(serving, "build_engine", make)
    monkeypatch.setattr(build, "build_text", lambda s, cfg: text())
    monkeypatch.setattr(report, "run_folder", lambda: tmp_path)
    return made


FAST = ("workload.time_scale=0.001",)


@pytest.mark.parametrize(
    "overrides",
    [
        ("workload=agentx", "workload.lanes=3", *FAST),
        ("workload=azure", *FAST),
        ("workload=mooncake", "workload.loop=closed", *FAST),
        ("workload=poisson", *FAST),
        ("workload=prompts", "prompt=def f(n):", "max_tokens=5"),
    ],
    ids=lambda o: o[0],
)
def test_each_workload_runs_and_reports(overrides, engine, tmp_path, capsys, monkeypatch):
    plotted = "workload=agentx" in overrides
    if not plotted:
        monkeypatch.setattr(show, "plots", lambda *_: None)
    result = run.run(settings(*overrides))
    assert result["completed"] == result["requests"] > 0 and result["failed_requests"] == 0
    assert result["total_tok_per_s"] > 0 and result["ttft_ms_p50"] > 0
    report.emit(result)
    out = capsys.readouterr().out
    assert "hit_theoretical" in out and "interactivity" in out
    assert json.loads((tmp_path / "result.json").read_text())["workload"] == result["workload"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(not r["warmup"] for r in rows) == result["requests"]
    files = {p.name for p in tmp_path.iterdir()}
    assert {"latency.csv", "card.csv"} <= files
    assert not plotted or {"latency.png", "timeline.png", "interactivity.png"} <= files
    ids = np.concatenate([a.tokens for a in engine[0].asks])
    assert result["workload"] == "prompts" or (ids >= 7).all()  # no special token in filler


def test_the_plan_is_the_same_in_every_run():
    w = settings("workload=mooncake").workload
    vocab = np.arange(10, 2000, dtype=np.int32)
    a, b = (requests.flat(w, vocab).requests for _ in range(2))
    assert [(t, r.tokens.tobytes(), r.max_tokens) for t, r in a] == [
        (t, r.tokens.tobytes(), r.max_tokens) for t, r in b
    ]


def test_a_trace_of_ones_own(tmp_path):
    rng = np.random.default_rng(0)
    write_azure(tmp_path / "a.csv", synthetic.flat(rng, 30, 3.0, 1.0, (900, 1.0, 9000), (90, 1.0, 900)))
    w = settings(
        "workload=azure", f"workload.path={tmp_path / 'a.csv'}", "workload.max_request_tokens=60", "workload.limit=30"
    ).workload
    planned = requests.flat(w, np.arange(10, 2000, dtype=np.int32))
    assert 0 < planned.left_out < 30 and len(planned.requests) == 30 - planned.left_out


REFUSED = [
    (["workload.lanes=0"], "workload.lanes must be >= 1, got 0"),
    (["workload.block_tokens=0"], "workload.block_tokens must be >= 1, got 0"),
    (["workload.duration_s=null"], "lanes would never end"),
    (["workload.start=[0.5]"], "workload.start must be a list of 2, got [0.5]"),
    (["workload.start=[0.5,0.1]"], "workload.start must be two shares"),
    (["workload.tree_cap_s=-1"], "workload.tree_cap_s must be >= 0 or null"),
    (["workload=azure", "workload.loop=round"], "workload.loop must be one of open, closed, got 'round'"),
    (["workload=azure", "+workload.lanes=3"], "unknown key workload.lanes; known in workload: "),
    (["workload=poisson", "workload.rate=0"], "workload.rate must be > 0, got 0"),
    (["workload.kind=weka"], "workload.kind must be one of agentx, azure"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda v: v[-1] if isinstance(v, list) else None)
def test_bad_settings(overrides, message):
    with pytest.raises(ValueError) as caught:
        settings(*overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target=here"], "target must be engine or http://HOST:PORT, got 'here'"),
        (["target=http://127.0.0.1:9"], "target=http://127.0.0.1:9: .*does not answer"),
        (["workload.path=nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["workload=tracelab"], "workload.path is null"),
        (["workload=prompts"], "no prompt"),
        (["workload.max_request_tokens=1"], "no session is left to play"),
        (["workload=azure", "workload.max_request_tokens=1"], "leaves no request"),
    ],
)
def test_bad_runs(overrides, message):
    with pytest.raises(ValueError, match=message):
        run.run(settings(*overrides))


def test_an_engine_that_dies_ends_the_run(monkeypatch):
    class Dying(Pausing):
        def step(self):
            raise RuntimeError("out of order")

    monkeypatch.setattr(serving, "build_engine", lambda s, mail: (Dying(mail, babble(2048)), None))
    with pytest.raises(RuntimeError, match="out of order"):
        run.run(settings("workload=poisson", *FAST))
