"""64 clients that stream, abort, go away and talk nonsense, for a while: no 5xx, nothing lost, nothing left.

`python -m tests.serve.crowd URL SECONDS CLIENTS` drives a server that runs, and prints what came of it.
"""

import asyncio
import json
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

MAX_TOKENS = 24
NONSENSE = [
    b"", b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": [99999999]}', b'{"messages": [{"role": "x"}]}', b'{"prompt": "\xff"}', b'{"a":' * 2000,
]  # fmt: skip


@dataclass
class Tally:
    status: Counter = field(default_factory=Counter)  # of answers
    kinds: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # what must not be


async def stream(http: httpx.AsyncClient, draw: random.Random, tally: Tally, give_up: bool) -> None:
    """A streamed completion, read to its end, or left after a few chunks."""
    path, body = ask(draw)
    left = draw.randrange(1, 6) if give_up else 1 << 30
    async with http.stream(
        "POST", path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ) as answer:
        tally.status[answer.status_code] += 1
        if answer.status_code != 200:
            await answer.aread()
            return
        finishes, usage, done = [], None, False
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            left -= 1
            if left == 0:
                return
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                tally.wrong.append(line)
                return
            finishes += [c["finish_reason"] for c in chunk["choices"] if c["finish_reason"]]
            usage = chunk["usage"] or usage
        if not done or len(finishes) != body["n"] or usage["completion_tokens"] > MAX_TOKENS * body["n"]:
            tally.wrong.append(f"done {done}, finishes {finishes}, usage {usage}")


async def whole(http: httpx.AsyncClient, draw: random.Random, tally: Tally) -> None:
    path, body = ask(draw)
    answer = await http.post(path, json=body)
    tally.status[answer.status_code] += 1
    if answer.status_code == 200 and len(answer.json()["choices"]) != body["n"]:
        tally.wrong.append(answer.text)


async def nonsense(http: httpx.AsyncClient, draw: random.Random, tally: Tally) -> None:
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/nowhere"])
    answer = await http.post(path, content=draw.choice(NONSENSE))
    tally.status[answer.status_code] += 1
    if not 400 <= answer.status_code < 500:
        tally.wrong.append(f"{answer.status_code} {answer.text[:200]}")


def ask(draw: random.Random) -> tuple[str, dict]:
    words = " ".join(
        draw.choice(["def", "class", "self", "return", "é", "x = 1"]) for _ in range(draw.randrange(1, 30))
    )
    body = {
        "max_tokens": draw.randrange(1, MAX_TOKENS),
        "n": draw.choice([1, 1, 1, 2]),
        "temperature": draw.choice([0, 1]),
    }
    if draw.random() < 0.3:
        body["stop"] = [draw.choice(["\n", "world", " ."])]
    if draw.random() < 0.5:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}
    return "/v1/completions", body | {"prompt": words}


async def client(url: str, number: int, until: float, tally: Tally) -> None:
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=300, verify=False) as http:
        while time.monotonic() < until:
            kind = draw.choices(["read", "leave", "whole", "cut", "nonsense"], [4, 2, 2, 1, 2])[0]
            tally.kinds[kind] += 1
            try:
                if kind == "nonsense":
                    await nonsense(http, draw, tally)
                elif kind == "cut":  # the connection is closed while the answer is on its way
                    async with asyncio.timeout(draw.random() * 0.3):
                        await whole(http, draw, tally)
                elif kind == "whole":
                    await whole(http, draw, tally)
                else:
                    await stream(http, draw, tally, kind == "leave")
            except TimeoutError:
                tally.kinds["cut in time"] += 1
            except httpx.HTTPError as error:
                tally.wrong.append(repr(error))


async def crowd(url: str, seconds: float, clients: int) -> Tally:
    """What came of ``clients`` clients in ``seconds``."""
    tally, until = Tally(), time.monotonic() + seconds
    await asyncio.gather(*(client(url, i, until, tally) for i in range(clients)))
    return tally


def resident_mb(pid: int | str = "self") -> float:
    """Memory of a process that is in use."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    made = asyncio.run(crowd(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps({"status": made.status, "kinds": made.kinds, "wrong": made.wrong[:5]}))
    sys.exit(bool(made.wrong) or any(s >= 500 for s in made.status))
