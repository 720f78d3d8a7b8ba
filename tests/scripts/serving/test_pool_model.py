"""The shipped model on a prefill engine and a decode group of two ranks, each killed under load: the tokens are those
of an undisturbed run."""

import asyncio
import signal

import pytest
from omegaconf import OmegaConf

from scripts import server
from tests.scripts import live
from tests.scripts.serving.striking import back, struck

OVERRIDES = ("serve=disagg", "serve.pools.decode.dp=2", "serve.window=halo", "serve.pages=64", "serve.max_batch=8",
             "serve.restart.pause_s=0.1")  # fmt: skip
PROMPTS = ["def parse_headers(fp):", "class Point:\n    def __init__(self, x, y):", "import", "for i in range(10):"]
BODIES = [
    {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "seed": i, "temperature": 0.8 * (i % 2)}
    for i, prompt in enumerate(PROMPTS)
]


@pytest.mark.slow
def test_the_models_tokens_survive_the_death_of_any_process(tmp_path):
    OmegaConf.save(live.composed(*OVERRIDES), tmp_path / "config.yaml", resolve=True)

    async def scenario(it):
        it.http.timeout = 200
        answers = await asyncio.gather(*(it.post(body) for body in BODIES))
        want = [answer.json()["choices"][0]["text"] for answer in answers]
        for name in ("prefill0.0", "decode0.1"):
            assert await struck(it, name, signal.SIGKILL, BODIES) == want, name
            await back(it, BODIES[0] | {"max_tokens": 3})

    result = live.serve(live.settings(*OVERRIDES), tmp_path, scenario, server.make_engine, 550)
    assert (result["completed"], result["errors"], result["restarts"], result["failed"]) == (14, 0, 2, 0)
