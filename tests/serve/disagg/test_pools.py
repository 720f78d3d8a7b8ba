"""The shipped checkpoint, fp32, behind a router: prefill on two ranks, decode on four, in processes that hand requests
over by NIXL. Hundreds of requests have the tokens of one engine, and nothing is left when they are through."""

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from scripts.build import build_settings
from scripts.entry import CONF
from scripts.server import make_engine
from scripts.serving.pool import Engines, engine_pools
from serve.front import Bounds, Front
from serve.request import Sampling
from serve.text import Text
from tests.serve.harness import Bench
from tests.serve.test_equality import SHIPPED, model  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow
REQUESTS, TOKENS, AT_ONCE = 320, 12, 48
SMALL = [
    "numerics=fp32",
    "serve.max_batch=8",
    "serve.pages=128",
    "serve.budget_tokens=256",
    "serve.window=retain",
    "track=none",
]
POOLS = ["serve=disagg", "serve.pools.prefill.dp=2", "serve.pools.decode.dp=4"]


@pytest.fixture(scope="module")
def asks() -> list[tuple[np.ndarray, Sampling]]:
    """Passages of this repository, a quarter of them behind a common beginning; greedy and sampled."""
    text = Text.load(SHIPPED)
    source = "\n".join(p.read_text(encoding="utf-8") for p in sorted(Path(CONF.parent / "serve").glob("*.py")))
    ids, rng = np.array(text.encode(source), np.int32), np.random.default_rng(1)
    made = []
    for i in range(REQUESTS):
        at, n = int(rng.integers(200, len(ids) - 200)), int(rng.integers(1, 120))
        prompt = ids[at : at + n]
        made.append((np.concatenate((ids[:130], prompt)) if i % 4 == 0 else prompt, Sampling(TOKENS, 0.8 * (i % 2), i)))
    return made


@pytest.fixture(scope="module")
def alone(model, asks) -> list[list[int]]:  # noqa: F811
    return Bench(model, pages=400, max_batch=32, budget_tokens=512).run(*asks)


@dataclass
class Played:
    tokens: list[list[int]]
    aborted: set[int] = field(default_factory=set)
    finishes: list[str] = field(default_factory=list)


async def play(engines: Engines, asks, aborts: bool) -> Played:
    """All requests, AT_ONCE open together; a fifth is aborted after some tokens, or before any."""
    hello = await engines.hello()
    front = Front(Bounds(hello.vocab_size, hello.context, hello.page_size), asyncio.get_running_loop().time)
    front.connect(engines.router.send)
    engines.connect(front.deliver)
    played, rng, gate = Played([[] for _ in asks]), Random(0), asyncio.Semaphore(AT_ONCE)

    async def one(i: int, tokens: np.ndarray, sampling: Sampling, stop_at: int | None) -> None:
        async with gate:
            stream = front.submit(tokens, sampling)
            if stop_at == 0:
                await asyncio.sleep(rng.random() / 4)
                stream.abort()
            async for event in stream:
                played.tokens[i] += event.tokens
                if event.finish:
                    played.finishes.append(event.finish)
                    if event.finish == "abort":
                        played.aborted.add(i)
                elif stop_at and len(played.tokens[i]) >= stop_at:
                    stream.abort()

    stops = [rng.choice((0, 1, 5)) if aborts and rng.random() < 0.2 else None for _ in asks]
    await asyncio.gather(*(one(i, *ask, stop) for i, (ask, stop) in enumerate(zip(asks, stops, strict=True))))
    return played


async def quiet(engines: Engines) -> dict[str, dict[str, float]]:
    """Figures of all engines once nothing is held any more."""
    busy = ("running", "waiting", "pages_used", "transfer_leases", "transfer_loading", "transfer_draining")
    async with asyncio.timeout(60):
        while not (seen := engines.stats()) or any(s.get(k) for s in seen.values() for k in busy):
            await asyncio.sleep(0.05)
    engines.router.check()
    return seen


def served(folder: Path, overrides: list[str], asks, aborts: bool = False) -> tuple[Played, dict]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=[*SMALL, *overrides])
    OmegaConf.save(config, folder / "config.yaml", resolve=True)

    async def go() -> tuple[Played, dict]:
        say = lambda line: print(line, file=sys.stderr)  # noqa: E731
        async with engine_pools(build_settings(config), folder / "config.yaml", make_engine, say) as engines:
            return await play(engines, asks, aborts), await quiet(engines)

    return asyncio.run(go())


def differ(played: Played, alone: list[list[int]]) -> list[int]:
    """Requests whose tokens are not those of one engine, as far as they came."""
    return [
        i
        for i, (got, want) in enumerate(zip(played.tokens, alone, strict=True))
        if got != (want[: len(got)] if i in played.aborted else want)
    ]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("more", [[], ["speculate=true"]], ids=["undrafted", "drafted"])
def test_disaggregated_as_colocated(more, asks, alone, tmp_path):
    played, seen = served(tmp_path, [*POOLS, *more], asks, aborts=True)
    assert not differ(played, alone) and len(played.finishes) == REQUESTS
    assert set(played.finishes) == {"length", "abort"} and 20 < len(played.aborted) < REQUESTS // 4
    landed = [s["transfer_landed_total"] for name, s in seen.items() if name.startswith("decode")]
    assert len(seen) == 6 and sum(landed) > REQUESTS // 2 and min(landed) > 0


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_as_one(ranks, asks, alone, tmp_path):
    played, seen = served(tmp_path, ["parallel=dep", f"parallel.axes.dp={ranks}", "speculate=true"], asks)
    assert not differ(played, alone) and set(played.finishes) == {"length"} and len(seen) == ranks
