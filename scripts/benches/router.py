"""The router's host work, and what its policies are worth: sessions whose prompts grow, over engines with a modelled
cache.

An engine here is a set of pages with least-recently-used eviction: it tells a first token at once, and the end once
so many other requests have come. Hits are beside those of one endless cache. Times are those of the thread.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np

from scripts import report
from scripts.build import Settings
from serve.request import Ask, Finish, Outputs, Sampling
from serve.router.choice import POLICIES, RouterRules
from serve.router.fleet import Post
from serve.router.router import Router
from serve.schedule.pages import chain

PAGE = 64
ENGINES, SESSIONS, TURNS, SHARED = 8, 64, 12, 8  # engines; sessions; turns of each; pages of their common beginning
CACHE = 1024  # pages of an engine
OPEN = 32  # requests at a time


class Caches:
    """Engines of one role, and the router before them. ``hits`` and ``computed`` are tokens, by engine."""

    def __init__(self, rules: RouterRules, engines: int, pages: int):
        self.pages, self.hits, self.computed = pages, Counter(), Counter()
        self.cached: dict[str, OrderedDict] = {f"engine{i}.0": OrderedDict() for i in range(engines)}
        self.open: deque[tuple[str, int]] = deque()
        posts = [Post(name, name, "both") for name in self.cached]
        self.router = Router(posts, rules, PAGE, self.take, lambda outputs: None, lambda: 0.0)
        for post in posts:
            self.router.joined(post.group)

    def take(self, name: str, ask: Ask) -> None:
        cached, found = self.cached[name], 0
        while found < len(ask.hashes) and ask.hashes[found] in cached:
            found += 1
        for page in reversed(ask.hashes):
            cached[page] = None
            cached.move_to_end(page)
        while len(cached) > self.pages:
            cached.popitem(last=False)
        self.hits[name] += found * PAGE
        self.computed[name] += len(ask.tokens) - found * PAGE
        self.open.append((name, ask.handle))

    def tell(self, name: str, handles: list[int], finished: list[Finish]) -> None:
        ones = np.ones(len(handles), np.int32)
        self.router.deliver(name, Outputs(np.array(handles, np.int64), ones, ones, finished=finished))

    def play(self, asks: list[Ask], most: int) -> None:
        for ask in asks:
            self.router.send(ask)
            self.tell(self.open[-1][0], [self.open[-1][1]], [])
            while len(self.open) > most:
                self.end()
        while self.open:
            self.end()
        self.router.check()

    def end(self) -> None:
        name, handle = self.open.popleft()
        self.tell(name, [], [Finish(handle, "length")])


def sessions(count: int, turns: int, seed: int) -> list[Ask]:
    """Turns of sessions in a random order: each prompt is the one before it and 2 to 12 pages more."""
    draw = np.random.default_rng(seed)
    shared = draw.integers(0, 1 << 16, SHARED * PAGE, np.int32)
    prompts, asks = [shared] * count, []
    for session in draw.permutation(np.repeat(np.arange(count), turns)).tolist():
        more = draw.integers(0, 1 << 16, PAGE * int(draw.integers(2, 13)), np.int32)
        prompts[session] = tokens = np.concatenate([prompts[session], more])
        asks.append(Ask(len(asks) + 1, tokens, chain(tokens, PAGE), Sampling(1000), session=f"s{session}"))
    return asks


def endless(asks: list[Ask]) -> float:
    """The hit rate of one cache that keeps everything."""
    pages = [page for ask in asks for page in ask.hashes]
    return (len(pages) - len(set(pages))) * PAGE / sum(len(ask.tokens) for ask in asks)


def policies(count: int, turns: int) -> tuple[list[list], dict]:
    asks = sessions(count, turns, 0)
    unnamed = [replace(ask, session="") for ask in asks]
    rows, out = [], {"hit_endless": endless(asks)}
    for policy in POLICIES:
        for named, played in (("named", asks), ("unnamed", unnamed)):
            caches = Caches(RouterRules(policy), ENGINES, CACHE)
            caches.play(played, OPEN)
            work = [caches.computed[name] for name in caches.cached]
            hit = sum(caches.hits.values()) / sum(len(ask.tokens) for ask in asks)
            rows.append([f"{policy}, sessions {named}", hit, hit / out["hit_endless"], max(work) / np.mean(work)])
            out[f"hit_{policy}_{named}"] = hit
    return rows, out


def timed(what: Callable[[], None], turns: int) -> float:
    """Median seconds of the thread."""
    took = []
    for _ in range(turns):
        begin = time.thread_time()
        what()
        took.append(time.thread_time() - begin)
    return median(took)


def work(tokens: int, running: int, turns: int) -> dict[str, float]:
    """Host work: a prompt placed among 32 engines, first and again; the outputs of a step passed on."""
    draw, caches, out = np.random.default_rng(0), Caches(RouterRules(), 32, 1), {}
    for name, n in (("1k", 1000), ("855k", tokens)):
        prompts = [draw.integers(0, 1 << 16, n, np.int32) for _ in range(turns)]
        asks = [Ask(i, p, chain(p, 256), Sampling(1)) for i, p in enumerate(prompts, 1 if name == "1k" else 1 << 20)]
        again = [replace(ask, handle=ask.handle + (1 << 19)) for ask in asks]
        for kind, some in (("new", asks), ("again", again)):
            left = iter(some)
            out[f"place_us_{name}_{kind}"] = 1e6 * timed(lambda left=left: caches.router.send(next(left)), turns)
    caches = Caches(RouterRules(), 1, 1)
    for handle in range(1, running + 1):
        caches.router.send(Ask(handle, np.ones(8, np.int32), [], Sampling(100_000)))
    arrays = np.arange(1, running + 1), np.ones(running, np.int32), np.ones(running, np.int32)
    out[f"step_us_{running}"] = 1e6 * timed(lambda: caches.router.deliver("engine0.0", Outputs(*arrays)), turns)
    return out


def run(s: Settings, tokens: int = 855_000, turns: int = 20, count: int = SESSIONS) -> dict:
    out = work(tokens, 256, turns)
    report.table("router", ("host work", "us"), [[name, value] for name, value in out.items()])
    rows, rates = policies(count, TURNS)
    columns = ("policy", "hit rate", "of an endless cache's", "heaviest engine / mean")
    report.table("policies", columns, rows)
    return {key: float(value) for key, value in {**out, **rates}.items()}
