"""The server: it says where it listens, drains on signals, tells all of a dead engine, refuses bad settings."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from omegaconf import OmegaConf

from scripts import server
from scripts.serving.api import Api
from scripts.serving.group import Restart
from tests.scripts.live import composed, live, settings
from tests.serve import fake_server

ROOT = Path(__file__).parents[2]
ASK = {"prompt": "abc", "max_tokens": 5}
LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}


@pytest.mark.medium
def test_what_was_accepted_is_finished_and_what_comes_after_is_refused(tmp_path):
    async def scenario(it):
        assert (await it.post(ASK | {"model": "tiny"})).json()["usage"]["completion_tokens"] == 5
        long = await it.later(LONG)
        os.kill(os.getpid(), signal.SIGTERM)
        await it.closing()
        refused = await it.post(ASK)
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        assert (await long).json()["usage"]["completion_tokens"] == 400

    result = live(tmp_path, scenario)
    assert (result["requests"], result["completed"], result["aborted"], result["tokens"]) == (2, 2, 0, 405)
    assert result["failed"] == 0


@pytest.mark.medium
def test_the_deadline_aborts_with_usage_so_far(tmp_path):
    async def scenario(it):
        long = await it.later(LONG)
        os.kill(os.getpid(), signal.SIGINT)
        answer = (await long).json()
        assert answer["choices"][0]["finish_reason"] == "abort" and 0 < answer["usage"]["completion_tokens"] < 400

    result = live(tmp_path, scenario, api={"drain_s": 0.2})
    assert (result["completed"], result["aborted"]) == (0, 1)


@pytest.mark.medium
def test_a_second_signal_ends_the_wait(tmp_path):
    async def scenario(it):
        long = await it.later(LONG | {"n": 3})
        os.kill(os.getpid(), signal.SIGINT)
        await it.closing()
        os.kill(os.getpid(), signal.SIGINT)
        assert (await long).status_code == 200

    assert live(tmp_path, scenario)["aborted"] == 3


DEATHS = [(fake_server.BREAKS, "ZeroDivisionError"), (fake_server.EXITS, "exit code 9")]


@pytest.mark.medium
@pytest.mark.parametrize(("config", "why"), DEATHS, ids=lambda v: v.strip())
def test_an_engine_that_dies_is_told_to_all(config, why, tmp_path):
    async def scenario(it):
        answer = await it.post(ASK)
        assert answer.status_code == 503 and why in answer.json()["error"]["message"]
        assert why in (await it.health())["status"] and (await it.post(ASK)).status_code == 503

    result = live(tmp_path, scenario, config, restart=Restart(enabled=False))
    assert (result["errors"], result["failed"]) == (1, 1)


@pytest.mark.medium
def test_an_engine_that_cannot_be_built(tmp_path):
    with pytest.raises(ValueError, match=r"^max_tokens=13 is bad luck$"):
        (tmp_path / "config.yaml").write_text(fake_server.UNLUCKY)
        asyncio.run(server.serve(settings(), tmp_path, fake_server.make_engine))


@pytest.mark.medium
def test_the_key_and_the_name(tmp_path):
    (tmp_path / "key").write_text("secret\n")

    async def scenario(it):
        assert (await it.post(ASK)).status_code == 401
        assert (await it.post(ASK, headers={"authorization": "Bearer secret"})).json()["model"] == "mine"

    live(tmp_path, scenario, api={"key_file": str(tmp_path / "key"), "model": "mine"})


@pytest.mark.medium
def test_the_program(tmp_path):
    """A signal to the whole group, as from a terminal: the result is the last line, the exit code 0."""
    where = [f"hydra.run.dir={tmp_path}", "track=none", "api.port=0"]
    command = [sys.executable, "-m", "tests.serve.fake_server", *where]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe, start_new_session=True)
    line = process.stderr.readline()
    about = json.loads((tmp_path / "server.json").read_text())
    assert line == f"listening on {about['url']}\n" and about["pid"] == process.pid
    assert httpx.post(f"{about['url']}/v1/completions", json=ASK).json()["choices"][0]["text"].startswith("Hello")
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    result = json.loads(out.splitlines()[-1])
    assert (process.returncode, result["completed"], result["tokens"]) == (0, 1, 5)
    assert json.loads((tmp_path / "result.json").read_text()) == result


@pytest.mark.medium
def test_two_models_have_engines_and_settings_of_their_own(tmp_path):
    config = OmegaConf.to_yaml(composed(), resolve=True)

    async def scenario(it):
        for model, text in (("first", "Hello"), ("second", "0 1 2")):
            answer = (await it.post(ASK | {"model": model})).json()
            assert answer["model"] == model and answer["choices"][0]["text"].startswith(text)
        assert {m["id"]: m["max_model_len"] for m in (await it.http.get("/v1/models")).json()["data"]} == {
            "first": 512, "second": 512}  # fmt: skip
        assert OmegaConf.load(tmp_path / "second" / "config.yaml").serve.pages == 16

    models = {"first": {}, "second": {"max_tokens": 16, "serve": {"pages": 16}}}
    result = live(tmp_path, scenario, config, api={"models": models})
    assert result["completed"] == 2


GOOD = {"host": "127.0.0.1", "port": 0, "model": None, "key_file": None, "without_key": False, "max_body_mb": 1}
GOOD |= {"body_timeout_s": 1.0, "max_prompt_tokens": 1, "chat_tokens": 1, "drain_s": 1.0}
BAD = [
    ({"port": 70000}, "api.port must be 0"),
    ({"host": "0.0.0.0"}, "api.key_file=FILE with a key"),
    ({"host": "::"}, "api.without_key=true"),
    ({"max_body_mb": 0}, "api.max_body_mb"),
    ({"drain_s": -1.0}, "api.drain_s"),
    ({"drain_s": float("nan")}, "api.drain_s"),
    ({"models": {}}, "api.models is empty"),
    ({"models": {"a/b": {}}}, "api.models.a/b: a model's name"),
    ({"models": {"a": 3}}, "api.models.a must be a mapping"),
    ({"models": {"a": {}}, "model": "b"}, "api.model=b names the one"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=str)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Api(**GOOD | change)


def test_other_machines_need_a_key_or_leave(tmp_path):
    (tmp_path / "key").write_text("two words")
    assert Api(**GOOD | {"host": "0.0.0.0", "without_key": True}).key() is None
    for name, message in (("gone", "no such file"), ("key", "one key without blanks")):
        with pytest.raises(ValueError, match=message):
            Api(**GOOD | {"host": "0.0.0.0", "key_file": str(tmp_path / name)}).key()


def test_a_port_in_use_is_one_line(tmp_path):
    from serve.api.listen import bind

    taken = bind("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(ValueError, match=r"api\.port"):
        bind("127.0.0.1", taken.getsockname()[1])
    taken.close()
