"""Groups of engine processes that are killed and stopped under load: every request ends, with the tokens it would have
had, the server serves on, and the group comes back."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import pytest
from omegaconf import OmegaConf

from scripts.serving.group import Restart
from scripts.serving.groups import Pool, pool_config
from serve.router.choice import RouterRules
from serve.text import Text
from tests.scripts.live import Live, live
from tests.scripts.serving.striking import back, busy, groups, pid_of, struck, until
from tests.serve import fake_server

COUNTING = Text.load("model/checkpoints/tiny").decode(fake_server.SHIPPED.encode(fake_server.COUNTING)[:300])
LONG = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
POOLS = {"prefill": Pool("prefill", 1, 1), "decode": Pool("decode", 1, 2)}
QUICK = Restart(pause_s=0.1)


async def survives(it: Live, name: str, number: signal.Signals) -> None:
    assert await struck(it, name, number, [LONG] * 6) == [COUNTING] * 6, name
    await back(it, LONG | {"max_tokens": 5})


@pytest.mark.medium
def test_an_engine_and_a_rank_of_a_group_may_be_killed_under_load(tmp_path):
    async def scenario(it):
        await survives(it, "prefill0.0", signal.SIGKILL)
        await survives(it, "decode0.1", signal.SIGKILL)
        text = (await it.http.get("/metrics")).text
        assert 'racklab_engines_router_groups_lost_total{model="tiny"} 2.0' in text
        handed = next(line for line in text.splitlines() if line.startswith("racklab_engines_router_handed_total"))
        assert float(handed.split()[-1]) >= 12

    result = live(tmp_path, scenario, fake_server.COUNTS, pools=POOLS, restart=QUICK)
    assert (result["completed"], result["errors"], result["restarts"], result["failed"]) == (14, 0, 2, 0)


@pytest.mark.medium
def test_a_stopped_engine_is_taken_for_dead(tmp_path):
    restart = Restart(pause_s=0.1, silent_s=10.0)
    result = live(tmp_path, lambda it: survives(it, "engine0.0", signal.SIGSTOP), fake_server.COUNTS, restart=restart)
    assert (result["completed"], result["errors"], result["restarts"]) == (7, 0, 1)


@pytest.mark.medium
def test_the_server_serves_while_a_group_is_down_and_says_so(tmp_path):
    async def scenario(it):
        os.kill(pid_of("decode0.0"), signal.SIGKILL)

        async def degraded():
            return (await it.health())["status"] == "degraded"

        await until(degraded)
        health = await it.http.get("/health")
        assert health.status_code == 200 and (await groups(it))["prefill0"] == "up"
        assert (await it.post(LONG)).json()["choices"][0]["text"] == COUNTING

    pools = {"prefill": Pool("prefill"), "decode": Pool("decode")}
    result = live(tmp_path, scenario, fake_server.COUNTS, pools=pools, restart=Restart(enabled=False))
    assert (result["completed"], result["restarts"], result["failed"]) == (1, 0, 0)


@pytest.mark.medium
def test_a_request_that_kills_engines_is_given_up_and_the_server_is_not(tmp_path):
    async def scenario(it):
        answer = await it.post(LONG)
        assert answer.status_code == 503 and "exit code 9" in answer.json()["error"]["message"]
        assert "tried 2 times" in answer.json()["error"]["message"]

        async def up():
            return (await it.health())["status"] == "ok"

        await until(up)

    result = live(tmp_path, scenario, fake_server.EXITS, restart=QUICK, router=RouterRules(retries=1))
    assert (result["errors"], result["restarts"], result["failed"]) == (1, 2, 0)


@pytest.mark.medium
def test_a_group_that_cannot_be_built_again_is_given_up(tmp_path):
    async def scenario(it):
        waits = asyncio.create_task(it.post(LONG))
        await until(lambda: busy(it, 1))
        (tmp_path / "config.yaml").write_text(fake_server.UNLUCKY)
        os.kill(pid_of("engine0.0"), signal.SIGKILL)
        answer = await waits
        assert answer.status_code == 503 and "bad luck" in answer.json()["error"]["message"]
        assert (await it.http.get("/health")).status_code == 503 and (await it.post(LONG)).status_code == 503

    result = live(tmp_path, scenario, fake_server.COUNTS, restart=QUICK)
    assert (result["errors"], result["failed"]) == (1, 1)


@pytest.mark.medium
def test_engines_end_with_their_server(tmp_path):
    """Nothing is left that nobody asks, even if the server has no time to say so."""
    where = [f"hydra.run.dir={tmp_path}", "track=none", "api.port=0", "max_tokens=16"]
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.fake_server", *where], stderr=subprocess.PIPE, text=True
    )
    assert "listening" in program.stderr.readline()
    url = json.loads((tmp_path / "server.json").read_text())["url"]
    with suppress(httpx.TransportError):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as stream:
            next(stream.iter_lines())
            children = descendants(program.pid)
            program.kill()
    program.wait()
    assert children
    for pid in children:
        for _ in range(500):
            if not alive(pid):
                break
            time.sleep(0.02)
        assert not alive(pid)


def descendants(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        mine = [int(word) for word in file.read().split()]
    return [*mine, *(pid for one in mine for pid in descendants(one))]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_pool_has_a_config_of_its_own(tmp_path):
    config = tmp_path / "config.yaml"
    OmegaConf.save({"parallel": {"axes": {"dp": 4, "ep": 4}}, "serve": {"pages": 8, "pools": {"a": {}}}}, config)
    assert pool_config(config, "engine", Pool("both")) == tmp_path / "config-engine.yaml"
    made = OmegaConf.load(pool_config(config, "decode", Pool("decode", 1, 2, {"pages": 16, "policy": {"name": "x"}})))
    assert made.parallel.axes == {"dp": 2, "ep": 2} and made.serve.pools is None
    assert (made.serve.pages, made.serve.policy.name) == (16, "x")


def test_bad_settings_are_refused():
    for change, message in (({"pause_s": -1.0}, "pause_s"), ({"silent_s": 0.0}, "silent_s")):
        with pytest.raises(ValueError, match=f"serve.restart.{message}"):
            Restart(**change)
