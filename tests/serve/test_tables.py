"""The page table on the device: what the scheduler's holds, from news alone; a step's inputs, whatever the context."""

import tracemalloc
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from serve.lockstep import Shape
from serve.request import Sampling
from serve.schedule.plan import Plan
from serve.schedule.table import Table
from serve.settings import Serve
from serve.step import Step
from serve.tables import PageTable
from tests import small
from tests.serve.harness import Bench

PAGE, BATCH, LONG = 64, 32, 855_000
ROOM = 5 * PAGE  # tokens to generate


def table(context: int) -> Table:
    """``BATCH`` sequences that decode, with ``context`` tokens each."""
    t = Table(BATCH, context + ROOM, PAGE, drafts=4)
    for slot in range(1, BATCH + 1):
        t.place(slot, slot, 0, context, context + ROOM, Sampling(ROOM))
        grow(t, slot, context // PAGE + 1)
        t.total[slot] = context + 1
    return t


def grow(t: Table, slot: int, pages: int) -> None:
    have = int(t.capacity[slot]) // PAGE
    t.pages[slot, have : have + pages] = 1 + np.arange(have, have + pages) * BATCH + slot
    t.capacity[slot] += pages * PAGE


def step(t: Table, device: PageTable) -> Step:
    runner = SimpleNamespace(table=device, model=SimpleNamespace(layout=SimpleNamespace(token_depth=3)))
    serve = Serve(PAGE, BATCH * (LONG // PAGE + 8), BATCH)
    return Step(runner, serve, Plan(t, np.arange(1, BATCH + 1), 4), Shape())


def held(made: Step) -> int:
    """Bytes of all arrays that a step holds but the table they are copies of."""
    news = made.news
    arrays = [a for a in vars(made).values() if isinstance(a, np.ndarray)]
    return sum(a.nbytes for a in (*arrays, *made.rule, news.slots, news.places, news.pages))


@cache
def decoding(context: int) -> tuple[Table, PageTable]:
    t, device = table(context), PageTable(BATCH + 1, -(-(context + ROOM) // PAGE))
    device.put(step(t, device).news)
    return t, device


@pytest.mark.parametrize("pages", [0, 1])
def test_a_steps_inputs_do_not_grow_with_the_context(pages):
    """Bytes held, and the most that were allocated meanwhile, with and without a new page of each sequence."""
    costs = []
    for context in (1000, LONG):
        t, device = decoding(context)
        for slot in range(1, BATCH + 1):
            grow(t, slot, pages)
        tracemalloc.start()
        made = step(t, device)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(made.news.pages) == pages * BATCH and peak < BATCH * 2000
        device.put(made.news)
        costs.append(held(made))
    assert costs[0] == costs[1]


@pytest.mark.parametrize("context", [1000, LONG])
def test_it_equals_the_schedulers_table(context):
    t, device = decoding(context)
    width = int(t.capacity[1]) // PAGE
    found = device.of(np.arange(1, BATCH + 1), width)
    assert found.shape == (BATCH + 1, width) and not found[0].any()
    assert (found[1:].numpy() == t.pages[1:, :width]).all()


def test_a_slot_that_changes_hands_is_told_anew():
    t, device = table(1000), PageTable(BATCH + 1, 40)
    device.put(device.news(t, np.arange(1, BATCH + 1)))
    t.clear(3)
    t.place(3, 77, 0, 70, 90, Sampling(20))
    t.capacity[3] = 0
    grow(t, 3, 2)
    held = int(t.capacity[4])
    t.clear(4)
    t.place(4, 4, 1, 1000, 1000 + ROOM, Sampling(ROOM))  # preempted and back, on as many pages
    t.capacity[4], t.pages[4, :3] = held, (501, 502, 503)
    news = device.news(t, np.array([4, 3]))
    device.put(news)
    assert len(news.pages) == 16 + 2 and device.rows[4, :3].tolist() == [501, 502, 503]
    assert device.rows[3, :2].tolist() == t.pages[3, :2].tolist()
    assert not len(device.news(t, np.arange(1, BATCH + 1)).pages)


@pytest.mark.parametrize("overlap", [0, 1])
def test_while_an_engine_preempts_and_plans_ahead(overlap, monkeypatch):
    """What each step is given is what the scheduler's table says when the step is launched."""
    seen = []

    def checked(self, runner, serve, plan, shape, made=Step.__init__):
        made(self, runner, serve, plan, shape)
        seen.append((plan.slots, plan.table.capacity[plan.slots] // PAGE, plan.table.pages[plan.slots].copy()))

    def compared(self, news, put=PageTable.put):
        put(self, news)
        slots, held, pages = seen[-1]
        for slot, count, row in zip(slots, held, pages, strict=True):
            assert (self.rows[slot, :count].numpy() == row[:count]).all()

    monkeypatch.setattr(Step, "__init__", checked)
    monkeypatch.setattr(PageTable, "put", compared)
    cfg = small.config()
    b = Bench(small.model(cfg), overlap=overlap, pages=5, window="none")
    b.run(*((small.tokens(40 + 9 * i, seed=i), Sampling(40)) for i in range(6)))
    assert b.engine.scheduler.counts["preempted"] and len(seen) > 40


def test_another_engine_on_the_same_runner_starts_anew():
    """Its handles and slots are those of the first, its pages are not."""
    model = small.model(small.config())
    asks = [(small.tokens(n, seed=n), Sampling(8, seed=n)) for n in (200, 70, 130)]
    want = [Bench(model).run(ask)[0] for ask in reversed(asks)]
    first, second = Bench(model), Bench(model)
    first.run(*asks)
    second.engine.device.runner = first.engine.device.runner
    pages = second.engine.scheduler.pages
    held = pages.take(20)  # so that it gets others
    pages.check = lambda holders, check=pages.check: check([*holders, held])
    handles = [second.ask(*ask) for ask in reversed(asks)]
    second.steps(60)
    assert [second.answers[h].tokens for h in handles] == want
