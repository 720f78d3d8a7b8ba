"""The scheduler under random load, against what each request gets alone; and each failure it must not have."""

import random
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import Abort
from serve.schedule.plan import Drawn
from serve.schedule.windows import WINDOWS
from tests.serve.drive import VOCAB, Loop, answer, ask, scheduler


@st.composite
def setups(draw) -> dict:
    """Sizes small enough that pages, slots and budgets run out."""
    one_of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    batch, page_size, context = one_of(1, 2, 3, 5, 8), one_of(2, 4, 8), one_of(24, 72)
    return {
        "window_tokens": one_of(2, 4, 6),
        "layers": one_of(1, 2, 3),
        "prefill": one_of("full", "decoder_replay"),
        "page_size": page_size,
        "pages": int(context / page_size * one_of(0.6, 1, 1.5, 2.5)),
        "max_batch": batch,
        "budget_tokens": batch + one_of(1, 2, 5, 40),
        "long_prefill_tokens": one_of(1, 3, 8, 100),
        "max_waiting": one_of(2, 1000, 1000),
        "max_wait_steps": one_of(1, 10, 1000),
        "retained": one_of(1, 2, 4, 12),
        "drafts": one_of(0, 0, 1, 3, 4),
        "context": context,
        "policy": one_of("fcfs", "priority", "cache_aware"),
    }


class Crowd:
    """Messages at random: prompts that share beginnings and continue answers, and aborts at any moment."""

    def __init__(self, rng: random.Random, page_size: int, count: int, aborts: float, most: int):
        self.rng, self.page_size, self.count, self.aborts, self.most = rng, page_size, count, aborts, most
        self.roots = [[rng.randrange(VOCAB) for _ in range(rng.choice((9, 60)))] for _ in range(2)]
        self.asked: list = []
        self.aborted: set[int] = set()

    def __call__(self, moment: str) -> list:
        out = []
        while len(self.asked) < self.count and self.rng.random() < 0.3:
            out.append(self.ask())
        if self.asked and self.rng.random() < self.aborts:
            victim = self.rng.choice(self.asked).handle  # perhaps finished already
            self.aborted.add(victim)
            out.append(Abort(victim))
        return out

    def ask(self):
        rng = self.rng
        root = rng.choice(self.roots)
        tokens = root[: rng.randint(0, self.most)] + [rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 7)))]
        if self.asked and rng.random() < 0.3:  # the next turn of a conversation
            before = rng.choice(self.asked)
            tokens = [*before.tokens.tolist(), *answer(before, self.most)[0], *tokens[:3]]
        tokens = tokens[: rng.choice((self.most, self.most - 1, self.most // 2))]  # the first can never fit
        most = rng.choice((1, 3, 20, 20))
        made = ask(
            len(self.asked) + 1,
            tokens,
            self.page_size,
            priority=rng.randint(0, 2),
            hashes=[] if rng.random() < 0.1 else None,
            max_tokens=most,
            seed=rng.randint(0, 3),
            stop_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 1, 3, 8)))),
            min_tokens=rng.randint(0, most),
            logprobs=rng.choice((None, None, 0, 2)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
        self.asked.append(made)
        return made


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("window", WINDOWS)
@settings(max_examples=30)
@given(setups(), st.integers(0, 2**32), st.sampled_from((0.0, 0.02, 0.2)))
def test_anything_in_any_order_gives_what_each_gets_alone(window, overlap, setup, seed, aborts):
    rng = random.Random(seed)
    s = scheduler(**setup | {"window": window} | ({"prefill": "full"} if window == "retain" else {}))
    most = min(s.limits.context, s.serve.pages * s.serve.page_size)
    crowd = Crowd(rng, s.serve.page_size, rng.choice((1, 4, 25)), aborts, most)
    loop = Loop(s, rng, overlap, crowd)
    loop.add(crowd.ask())
    tokens = 0
    while len(crowd.asked) < crowd.count or not loop.idle:
        loop.step()
        tokens = sum(len(a.tokens) + a.sampling.max_tokens for a in crowd.asked)
        assert loop.steps < 200 + 10 * tokens, "no progress"
    loop.run(0)
    loop.judge(crowd.aborted)


# --- one failure each ---


def loop_of(overlap: bool = False, **sizes) -> tuple[Loop, dict]:
    """A loop, and the messages that are to arrive at its moments, last first."""
    mail: dict[str, list] = {"first": [], "planned": [], "flying": []}
    arrive = lambda moment: [mail[moment].pop()] if mail[moment] else []  # noqa: E731
    return Loop(scheduler(**sizes), random.Random(0), overlap, arrive), mail


@pytest.mark.parametrize("drafts", (0, 3))
def test_failure_32_what_was_drawn_for_one_preempted_meanwhile_is_dropped_whole(drafts):
    """With overlap the younger is pushed out while its step runs: its tokens, log-probabilities and pages do not count,
    and it draws the same ones later."""
    loop, _ = loop_of(True, pages=14, drafts=drafts, window="replay")
    loop.add(*(ask(h, range(9 * h, 9 * h + 9), max_tokens=25, logprobs=1) for h in (1, 2, 3)))
    update, stale = loop.s.update, []
    loop.s.update = lambda plan, drawn: stale.append(not plan.live().all()) or update(plan, drawn)
    loop.run()
    loop.judge()
    assert loop.s.counts["preempted"] and any(stale)


def test_prompt_log_probabilities_come_once_though_the_prompt_is_computed_twice():
    loop, _ = loop_of(pages=8, long_prefill_tokens=4, policy="priority")
    loop.add(ask(1, range(16), priority=1, max_tokens=3, prompt_logprobs=0))
    loop.step()
    loop.add(ask(2, range(20, 31), priority=0, max_tokens=20))
    loop.run()
    loop.judge()
    assert loop.s.counts["preempted"] and loop.prompt_logprobs[1] == list(range(1, 16))


def test_failure_33_no_more_are_preempted_than_pages_are_needed():
    """Pages given back can be taken at once: one page is short, one sequence goes."""
    loop, _ = loop_of(pages=12, max_batch=4)
    loop.add(*(ask(h, range(9 * h, 9 * h + 9), max_tokens=40) for h in (1, 2, 3, 4)))
    before = 0
    while loop.s.counts["preempted"] < 2:
        loop.step()
        assert loop.s.counts["preempted"] - before <= 1
        before = loop.s.counts["preempted"]
    loop.run()
    loop.judge()


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("moment", ("first", "planned", "flying"))
@pytest.mark.parametrize("step", range(8))
def test_failure_34_an_abort_in_any_state(overlap, moment, step):
    """Waiting, placed, catching up, decoding, planned, in flight, finished; twice; and one that never was."""
    loop, mail = loop_of(overlap, max_batch=2, long_prefill_tokens=4, window="replay")
    loop.add(*(ask(h, range(9 * h, 9 * h + 9), max_tokens=3) for h in (1, 2, 3)))
    for _ in range(step):
        loop.step()
    mail[moment] = [Abort(h) for h in (1, 3, 1, 99)]
    loop.run()
    loop.judge({1, 3})
    assert loop.finished[2].reason == "length"


def test_failure_35_what_can_never_fit_is_refused_and_the_line_moves_on():
    loop, _ = loop_of(pages=5, context=40)
    loop.add(ask(1, range(20)), ask(2, range(40)), ask(3, []), ask(4, range(19), max_tokens=9))
    loop.run()
    loop.judge()
    said = {h: f.message for h, f in loop.finished.items()}
    assert "serve.pages hold 20: it can never fit" in said[1] and "the context is 40" in said[2]
    assert "the prompt is empty" in said[3] and loop.got[4] and not said[4]


def test_a_line_that_is_full_refuses():
    loop, _ = loop_of(max_waiting=2)
    loop.add(*(ask(h, range(9)) for h in (1, 2, 3)))
    loop.run()
    assert "serve.max_waiting" in loop.finished[3].message and loop.got[2]


def test_failure_36_a_budget_smaller_than_a_page_makes_progress():
    loop, _ = loop_of(page_size=8, pages=8, max_batch=1, budget_tokens=2, window="retain")
    loop.add(ask(1, range(30)))
    loop.run(40)
    loop.judge()


def test_prompts_go_on_beside_sequences_that_draft():
    """Drafts never take the last of the budget."""
    loop, _ = loop_of(max_batch=2, budget_tokens=3, drafts=4)
    loop.add(ask(1, range(4), max_tokens=40))
    loop.step(), loop.step()
    loop.add(ask(2, range(9), max_tokens=1))
    while 2 not in loop.finished:
        loop.step()
    assert 1 not in loop.finished
    loop.run()
    loop.judge()


@pytest.mark.parametrize("window", ("replay", "halo", "retain"))
def test_failure_37_a_prompt_cached_to_its_end_computes_a_token(window):
    """The same prompt again, 1 to 24 tokens: lookup first, then counts; never an empty stretch."""
    for length in range(1, 25):
        loop, _ = loop_of(window=window, window_tokens=2, layers=2)
        loop.add(ask(1, range(length), max_tokens=2))
        loop.run()
        rows = loop.runner.rows
        loop.add(ask(2, range(length), max_tokens=2))
        loop.run()
        loop.judge()
        finish = loop.finished[2]
        whole = (length - 1) // 4 * 4
        replayed = {"replay": 2, "halo": 4, "retain": 0}[window]
        assert finish.cached_tokens == (whole if whole > replayed else 0)
        assert finish.replayed_tokens == (replayed if finish.cached_tokens else 0)
        assert loop.runner.rows - rows == length + 1 - finish.cached_tokens + finish.replayed_tokens


@pytest.mark.parametrize("overlap", (False, True))
def test_failure_37_pages_are_hit_only_when_they_are_written(overlap):
    """The same prompt twice: the second finds what steps that have ended wrote, not what is planned or in flight."""
    for late in range(6):
        loop, _ = loop_of(overlap, window="retain", long_prefill_tokens=4, retained=8)
        loop.add(ask(1, range(22)))
        for _ in range(late):
            loop.step()
        written = int(loop.s.table.computed[next(iter(loop.s.running))]) if loop.s.running else 0
        loop.add(ask(2, range(22)))
        loop.run()
        loop.judge()
        assert loop.finished[2].cached_tokens <= min(written, 20)


@pytest.mark.parametrize("drafts", (0, 2))
@pytest.mark.parametrize("window", ("replay", "halo", "retain"))
def test_failure_29_everything_cached_can_be_hit(window, drafts):
    """Every name leads to a page by way of its whole prompt, and every turn of a conversation hits all full pages of
    the last one that the rule lets it, drafts or not: the drafter's own windows have no vote (failure 26)."""
    loop, _ = loop_of(window=window, pages=200, context=200, retained=60, drafts=drafts, window_tokens=2, layers=2)
    chains, tokens = [], list(range(7))
    for turn in range(1, 8):
        request = ask(turn, tokens, max_tokens=13, seed=turn)
        loop.add(request)
        loop.run()
        cached = loop.finished[turn].cached_tokens
        known = (len(tokens) - 4) // 4 * 4 if turn > 1 else 0  # the answer's last token was never computed
        assert cached == known, f"turn {turn}"
        tokens = [*tokens, *loop.got[turn], turn, turn + 1, turn + 2]
        chains.append(ask(0, tokens).hashes)
    reach = {name for names in chains for name in names[: len(loop.s.pages.find(names, len(names)))]}
    assert reach == set(loop.s.pages._index)


def test_failure_38_huge_prompts_are_admitted_by_their_pages():
    """Eight prompts of half the pool each: two at most are in at a time, none is lost, none is pushed out."""
    loop, _ = loop_of(pages=32, context=80, max_batch=8)
    loop.add(*(ask(h, range(h, h + 60), max_tokens=2) for h in range(1, 9)))
    while not loop.idle:
        loop.step()
        assert len(loop.s.running) <= 2
    loop.judge()
    assert loop.s.counts["preempted"] == 0


@pytest.mark.parametrize("pages", (32, 9))
@pytest.mark.parametrize("overlap", (False, True))
def test_nobody_waits_for_ever(overlap, pages):
    """A request of the lowest priority, under an endless stream of higher ones, with and without preemption."""
    loop, _ = loop_of(overlap, policy="priority", max_wait_steps=30, max_batch=3, pages=pages)
    loop.add(ask(1, range(9), priority=9, max_tokens=6))
    handle = 1
    while 1 not in loop.finished:
        while len(loop.s.waiting) < 6:
            handle += 1
            loop.add(ask(handle, range(handle % 30, handle % 30 + 9), priority=0, max_tokens=20))
        loop.step()
        assert loop.steps < 30 + 60, "still waiting"
    assert pages > 9 or loop.s.counts["preempted"]


def test_a_decoding_batch_is_named_in_company_and_at_its_end():
    """Generated pages are found by the next turn, though most are named together or when the sequence leaves."""
    loop, _ = loop_of(window="replay", pages=60, context=200)
    loop.add(ask(1, range(5), max_tokens=60))
    loop.run()
    loop.add(ask(2, [*range(5), *loop.got[1], 1], max_tokens=1))
    loop.run()
    loop.judge()
    assert loop.finished[2].cached_tokens == 64


# --- host work does not grow with prompts ---


class Counted(list):
    """Names that count how many of them are read."""

    reads = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        Counted.reads += len(got) if isinstance(at, slice) else 1
        return got


def work(act) -> tuple[int, int]:
    """Calls of Python and C functions in ``act()``, and the most bytes that it had allocated."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    act()  # whatever is made once
    tracemalloc.start()
    act()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sys.setprofile(count)
    act()
    sys.setprofile(None)
    return calls, most


def turn(s) -> None:
    plan = s.settle(s.plan())
    s.update(plan, Drawn(np.ones((len(plan), 1), np.int64), np.ones(len(plan), np.int64)))


def long_scheduler(tokens: int, **sizes):
    pages = 2 * -(-tokens // 64) + 4
    return scheduler(
        page_size=64, pages=pages, budget_tokens=1 << 20, long_prefill_tokens=1 << 20, context=tokens + 1000, **sizes
    )


def test_a_decode_step_costs_the_same_after_any_prompt():
    done = {}
    for tokens in (1000, 855_000):
        s = long_scheduler(tokens, window="replay")
        s.add([ask(h, range(h, h + tokens), 64, max_tokens=900) for h in (1, 2)])
        turn(s), turn(s)
        done[tokens] = work(lambda s=s: turn(s))
    (calls, most), (calls_855k, most_855k) = done.values()
    assert calls == calls_855k and most_855k < most + 1000


@pytest.mark.parametrize("window", ("none", "replay", "halo", "retain"))
@pytest.mark.parametrize("policy", ("fcfs", "cache_aware"))
def test_a_prompt_that_waits_for_pages_costs_the_same_whatever_its_length(window, policy):
    """It is looked up once; then only what changed is."""
    done = {}
    for tokens in (1000, 855_000):
        s = long_scheduler(tokens, window=window, policy=policy, retained=4)
        first, second = ask(1, range(tokens), 64, max_tokens=900), ask(2, range(7, 7 + tokens), 64, max_tokens=900)
        s.add([first, second])
        turn(s), turn(s)
        s.add([ask(3, [*range(tokens - 200), *range(300)], 64)])
        s.waiting._line[0][1].names = Counted(s.waiting._line[0][1].names)
        calls, most = work(lambda s=s: turn(s))
        Counted.reads = 0
        turn(s)
        assert s.waiting, "it was to wait"
        done[tokens] = calls, Counted.reads
        assert most < 8 * tokens / 64 * 8 + 20_000
    (calls, reads), (calls_855k, reads_855k) = done.values()
    assert calls_855k <= calls + 8 and reads_855k <= max(reads, 4)
