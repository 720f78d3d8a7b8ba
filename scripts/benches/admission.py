"""Admission of a prompt of 855,000 tokens on the engine's thread: take in the request, then the plan that places it.

Cold, and with every full page cached; pages of 256. The front end has hashed the prompt by then: its time is printed
apart. Beside it a scheduler of lists does the same work as engines in Python commonly do it: ids are a list, pages are
objects, their hashes are made where the request is admitted, a page table is a list. The sides take turns; neither is
charged for reading the request off the wire, where a buffer of ids gains once more. Times are those of the thread, so
that a busy machine counts less.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from scripts import report
from scripts.build import Settings
from scripts.progress import progress
from serve.request import Abort, Ask, Sampling
from serve.schedule.pages import SALT, chain
from serve.schedule.plan import Drawn
from serve.schedule.policies import fcfs
from serve.schedule.scheduler import Scheduler
from serve.settings import Limits, Serve

TOKENS = 855_000
PAGE_SIZE = 256
TURNS = 30
REPEATS = 5  # of ours in a turn: an engine comes by here at every step, not once in 50 ms
VOCAB = 129_280
WINDOW, LAYERS = 128, 40
FILL = 8192  # rows of a step while the cache is filled
BUDGET = 512  # rows of a step that admits


# --- the baseline ---


@dataclass(eq=False, slots=True)
class Block:
    number: int
    refs: int = 0
    name: bytes | None = None


class Lists:
    """Pages as objects in a dict of names and an ordered free list; a request's pages are taken when it is admitted."""

    def __init__(self, count: int, page_size: int):
        self.page_size = page_size
        self.blocks = [Block(i) for i in range(count)]
        self.free = OrderedDict((b.number, b) for b in self.blocks)
        self.cached: dict[bytes, Block] = {}

    def admit(self, ids: list[int]) -> list[Block]:
        """The request's page table."""
        names: list[bytes] = []
        for at in range(0, len(ids) - self.page_size + 1, self.page_size):
            page = np.frombuffer(array("i", ids[at : at + self.page_size]), np.int32)
            names += chain(page, self.page_size, names[-1] if names else SALT)
        table = []
        for name in names[: (len(ids) - 1) // self.page_size]:
            block = self.cached.get(name)
            if block is None:
                break
            if block.refs == 0:
                del self.free[block.number]
            block.refs += 1
            table.append(block)
        for _ in range(-(-len(ids) // self.page_size) - len(table)):
            _, block = self.free.popitem(last=False)
            if block.name is not None:
                del self.cached[block.name]
                block.name = None
            block.refs = 1
            table.append(block)
        return table

    def leave(self, table: list[Block]) -> None:
        for block in reversed(table):
            block.refs -= 1
            if block.refs == 0:
                self.free[block.number] = block

    def publish(self, table: list[Block], names: list[bytes]) -> None:
        for block, name in zip(table, names):
            block.name, self.cached[name] = name, block


# --- ours ---


def filled(ask: Ask | None, pages: int) -> Scheduler:
    """An idle scheduler whose cache holds the pages of ``ask``."""
    serve = Serve(PAGE_SIZE, pages, 8, budget_tokens=FILL, long_prefill_tokens=FILL, window="replay")
    s = Scheduler(Limits(serve, pages * PAGE_SIZE, WINDOW, LAYERS), fcfs.key)
    s.add([ask] if ask else [])
    while not s.idle:
        plan = s.settle(s.plan())
        s.update(plan, Drawn(np.ones((1, 1), np.int64), np.array([plan.prefills[0].last], np.int64)))
    s.flush()
    return s


def admit(s: Scheduler, ids: np.ndarray, names: list[bytes]) -> tuple[float, int]:
    """Seconds of one admission, and the tokens found in the cache; the request is gone afterwards. It comes with names
    that nobody has looked at yet, as off the wire."""
    ask = Ask(1, ids, [bytes(bytearray(name)) for name in names], Sampling(1))
    begin = time.thread_time()
    s.add([ask])
    plan = s.settle(s.plan())
    took = time.thread_time() - begin
    s.add([Abort(1)])
    s.update(plan, Drawn(np.zeros((1, 1), np.int64), np.zeros(1, np.int64)))
    return took, plan.prefills[0].sequence.cached


def timed(act: Callable) -> float:
    begin = time.thread_time()
    act()
    return time.thread_time() - begin


def run(s: Settings, tokens: int = TOKENS, turns: int = TURNS) -> dict:
    """Table of admission times; keys ``admit_ms_855k_cold``, ``admit_ms_855k_hit``, ``baseline_ms`` and ``ratio``, the
    smaller of the two."""
    ids = np.random.default_rng(0).integers(0, VOCAB, tokens, np.int32)
    names, listed, pages = chain(ids, PAGE_SIZE), ids.tolist(), -(-tokens // PAGE_SIZE) + 8
    ask = Ask(1, ids, names, Sampling(1))
    ours = {"cold": filled(None, pages), "hit": filled(ask, pages)}
    lists = {"cold": Lists(pages, PAGE_SIZE), "hit": Lists(pages, PAGE_SIZE)}
    table = lists["hit"].admit(listed)
    lists["hit"].publish(table, names)
    lists["hit"].leave(table)
    times: dict[tuple, list[float]] = {}
    with progress("bench=admission", turns, "turns") as advance:
        for _ in range(turns):
            times.setdefault(("front end", ""), []).append(timed(lambda: chain(ids, PAGE_SIZE)))
            for kind in ours:
                for _ in range(REPEATS):
                    took, cached = admit(ours[kind], ids, names)
                    if cached != (len(names) * PAGE_SIZE if kind == "hit" else 0):
                        raise ValueError(f"bench=admission: {cached} tokens cached when {kind}; no figures")
                    times.setdefault(("ours", kind), []).append(took)
                begin = time.thread_time()
                table = lists[kind].admit(listed)
                times.setdefault(("lists", kind), []).append(time.thread_time() - begin)
                lists[kind].leave(table)
            advance(1)
    ms = {key: median(values) * 1e3 for key, values in times.items()}
    rows = [[k, ms["ours", k], ms["lists", k], ms["lists", k] / ms["ours", k]] for k in ours]
    rows.append(["front end: hashing", ms["front end", ""], None, None])
    report.table("admission", (f"{tokens:,} tokens", "engine's thread, ms", "lists, ms", "ratio"), rows)
    return {
        "admit_ms_855k_cold": round(ms["ours", "cold"], 4),
        "admit_ms_855k_hit": round(ms["ours", "hit"], 4),
        "baseline_ms": round(min(ms["lists", k] for k in ours), 3),
        "baseline_ms_cold": round(ms["lists", "cold"], 3),
        "baseline_ms_hit": round(ms["lists", "hit"], 3),
        "ratio": round(min(ms["lists", k] / ms["ours", k] for k in ours), 1),
        "hash_ms_855k": round(ms["front end", ""], 3),
    }
