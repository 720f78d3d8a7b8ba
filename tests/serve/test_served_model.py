"""The shipped model behind the HTTP server: the official client gets the plain loop's tokens, streamed and not, and a
client that scores as lm-eval does gets the model's own log-probabilities."""

import asyncio
import json
from functools import cache
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from hydra import compose, initialize_config_dir

from model.pack import Span
from scripts.build import build_runner, build_settings
from scripts.entry import CONF
from scripts.serving.engine import build_engine
from serve import offline
from serve.front import Bounds
from serve.request import Sampling
from tests.serve import score
from tests.serve.served import run, serve

PROMPTS = ["def parse_headers(fp):", "class Point:\n    def __init__(self, x, y):", "import"]
TOKENS = 10
TASK = Path(__file__).parents[1] / "data" / "lm_eval"


@cache
def settings(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return build_settings(compose("config", overrides=["serve.pages=64", "serve.max_batch=8", *overrides]))


@cache
def plain():
    return build_runner(settings())


def serving(**how):
    s = settings(*(f"{k}={str(v).lower()}" for k, v in how.items()))
    bounds = Bounds(vocab_size=0, context=s.serve.pages * s.serve.page_size, page_size=s.serve.page_size)
    return serve(text=plain()[1], bounds=bounds, build=lambda mail: build_engine(s, mail)[0])


@pytest.mark.medium
@pytest.mark.parametrize("speculate", [False, True])
def test_the_official_client_gets_the_plain_loops_tokens(speculate):
    runner, text = plain()
    sampling = [Sampling(TOKENS, 0.8, 3 + i, (text.eos_id,)) for i in range(2)]
    want = [
        [text.decode(c.tokens) for c in offline.generate(runner, [np.array(text.prompt(p))] * 2, sampling)]
        for p in PROMPTS
    ]

    async def go():
        async with serving(speculate=speculate) as served:
            api = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
            how = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0.8, "seed": 3}
            got = await api.completions.create(prompt=PROMPTS, n=2, **how)
            assert [c.text for c in got.choices] == [t for pair in want for t in pair]
            streamed = ""
            async for chunk in await api.completions.create(prompt=PROMPTS[1], stream=True, **how):
                streamed += chunk.choices[0].text
            assert streamed == want[1][0]
            await api.close()

    run(go, 300)


@pytest.mark.medium
def test_scoring_by_echo_gives_the_models_log_probabilities():
    """The request of lm-eval's ``local-completions``: ids, echo, one alternative, one token that it drops."""
    runner, text = plain()
    ids = text.prompt("def f(n):\n    return n * f(n - 1)\n")
    span = Span(np.array(ids, np.int64), 0, 1, range(1, 3))
    logits, _ = runner.step([span], torch.arange(len(ids)))
    known = torch.log_softmax(logits.float(), -1)
    want = known[:-1].gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)

    async def go():
        async with serving() as served:
            api = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
            how = {"model": "tiny", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234}
            told = (await api.completions.create(prompt=ids, **how)).choices[0].logprobs
            await api.close()
        assert len(told.token_logprobs) == len(ids) + 1 and told.token_logprobs[0] is None
        torch.testing.assert_close(torch.tensor(told.token_logprobs[1:-1]), want, rtol=1e-4, atol=1e-4)
        greedy = [max(top.values()) == value for value, top in zip(told.token_logprobs[1:-1], told.top_logprobs[1:-1])]
        assert greedy == (known[:-1].argmax(-1) == torch.tensor(ids[1:])).tolist()

    run(go, 300)


@pytest.mark.slow
def test_a_task_scores_over_http_as_in_process():
    """What lm-eval sends for tests/data/lm_eval, against the same rows by the plain loop's runner."""
    runner, text = plain()
    rows = [json.loads(line) for line in (TASK / "next_line.jsonl").read_text().splitlines()]

    async def scored(api: openai.AsyncOpenAI, ids: list[int], context: int) -> float:
        how = {"model": "tiny", "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "seed": 1234}
        told = (await api.completions.create(prompt=ids, **how)).choices[0].logprobs
        return sum(told.token_logprobs[context:-1])

    async def go():
        async with serving() as served:
            api = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=600)
            right = 0
            for row in rows:
                asks = [score.split(text, row["context"], choice) for choice in row["choices"]]
                sums = await asyncio.gather(*(scored(api, *ask) for ask in asks))
                right += int(np.argmax(sums)) == row["answer"]
                assert np.allclose(sums, [score.likelihood(runner, *ask) for ask in asks], rtol=1e-4)
            await api.close()
        assert right / len(rows) == score.score(runner, text, rows)["acc"]

    run(go, 900)
