"""Several models behind one HTTP server, sessions, and what health says of engines."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from serve.api.service import Behind
from serve.metrics import Metrics
from tests.serve.served import make, run, serve

ASK = {"prompt": "abc", "max_tokens": 5, "temperature": 0}


@asynccontextmanager
async def two(**how):
    """A server of the models tiny and other, with a client."""
    metrics = Metrics()
    service, engine = make("Goodbye. ", name="other", metrics=metrics)
    task = asyncio.create_task(engine.run())
    async with serve("Hello. ", metrics=metrics, more=service.offers, **how) as served:
        async with httpx.AsyncClient(base_url=served.url, verify=False) as http:
            yield served, http, service.offers[0]
    task.cancel()


def test_a_request_goes_to_the_model_it_names():
    async def go():
        async with two() as (served, http, other):
            for model, text in ((None, "Hello"), ("tiny", "Hello"), ("other", "Goodb")):
                body = ASK if model is None else ASK | {"model": model}
                answer = (await http.post("/v1/completions", json=body)).json()
                assert (answer["model"], answer["choices"][0]["text"]) == (model or "tiny", text)
            for path, body in (
                ("/v1/completions", ASK),
                ("/tokenize", {"prompt": "a"}),
                ("/detokenize", {"tokens": [5]}),
            ):
                assert (await http.post(path, json=body | {"model": "other"})).status_code == 200
                refused = await http.post(path, json=body | {"model": "third"})
                assert refused.status_code == 404 and "'tiny', 'other'" in refused.json()["error"]["message"]
            told = (await http.get("/v1/models")).json()["data"]
            assert [card["id"] for card in told] == ["tiny", "other"]
            assert (await http.get("/v1/models/other")).json()["id"] == "other"
            assert (await http.get("/v1/models/third")).status_code == 404
            assert (served.offer.metrics.totals["requests"], other.metrics.totals["requests"]) == (2, 2)
            lines = (await http.get("/metrics")).text.splitlines()
            assert 'racklab_requests_total{finish="length",model="tiny"} 2.0' in lines
            assert 'racklab_requests_total{finish="length",model="other"} 2.0' in lines
            assert 'racklab_engine_running{engine="engine0.0",model="other"} 0.0' in lines

    run(go)


def test_one_model_without_engines_leaves_the_other():
    async def go():
        async with two() as (served, http, other):
            assert (await http.get("/health")).json()["status"] == "ok"
            other.front.fail("its engines are gone")
            health = await http.get("/health")
            assert health.status_code == 200 and health.json()["status"] == "degraded"
            assert health.json()["models"]["other"]["status"] == "its engines are gone"
            assert (await http.post("/v1/completions", json=ASK | {"model": "other"})).status_code == 503
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
            served.front.fail("these, too")
            assert (await http.get("/health")).status_code == 503

    run(go)


@pytest.mark.parametrize(("state", "status"), [("up", "ok"), ("starting", "degraded"), ("gone", "degraded")])
def test_health_tells_the_state_of_each_group(state, status):
    service, _ = make()
    offer = replace(service.offers[0], behind=Behind(groups=lambda: {"prefill0": state, "decode0": "up"}))
    told = replace(service, offers=(offer,)).health()
    assert told["status"] == status and told["models"]["tiny"]["groups"]["prefill0"] == state


def test_a_session_is_what_a_client_says_requests_have_in_common():
    long, odd = "x" * 1000, "\ud800"
    cases = [
        ({}, {}, ""),
        ({"x-session-affinity": "s-1"}, {"user": "u"}, "s-1"),
        ({}, {"user": "u", "prompt_cache_key": "k"}, "k"),
        ({}, {"user": "u"}, "u"),
        ({}, {"user": {"not": "text"}}, ""),
        ({}, {"user": long}, long[:256]),
        ({}, {"user": odd}, "\\ud800"),
    ]

    async def go():
        async with serve() as served, httpx.AsyncClient(base_url=served.url, verify=False) as http:
            for headers, fields, session in cases:
                body = json.dumps(ASK | fields)
                assert (await http.post("/v1/completions", content=body, headers=headers)).status_code == 200
                assert served.engine.asks[-1].session == session

    run(go)


def test_a_paused_server_takes_requests_and_answers_them_when_it_goes_on():
    async def go():
        async with serve() as served, httpx.AsyncClient(base_url=served.url) as http:
            assert (await http.post("/pause")).json() == {"paused": True}
            asked = asyncio.create_task(http.post("/v1/completions", json=ASK))
            await asyncio.wait([asked], timeout=0.3)
            assert not asked.done()
            assert (await http.post("/resume")).json() == {"paused": False}
            assert (await asked).status_code == 200

    run(go)
