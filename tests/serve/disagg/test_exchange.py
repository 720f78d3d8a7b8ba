"""Engines that hand requests over, in one process: tokens are those of one engine that does all."""

import asyncio
from collections import defaultdict
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

from model.transformer import Model
from parallel.local import Fabric, Fault, LocalLink
from scripts.serving.engine import engine_on, runner_of
from scripts.serving.handing import Ties
from serve.disagg.handoff import Letter, Rules
from serve.mailbox import Mailbox
from serve.request import Abort, Ask, Handed, Outputs, Sampling
from serve.schedule.pages import chain
from serve.settings import Serve, Speculation
from tests import small
from tests.serve.harness import SERVE, Answer, Bench

CFG = small.config()
RULES = Rules(lease_s=10, grace_s=2, beat_s=2, retry_s=0.5, timeout_s=20, quarantine_s=24)
BASE = small.tokens(400, seed=9)
LENGTHS = (1, 2, 5, 30, 63, 64, 65, 100, 128, 130, 200)
ASKS = [(small.tokens(n, seed=n), Sampling(16, (i % 2) * 0.9, seed=i)) for i, n in enumerate(LENGTHS)]
ASKS += [(BASE[:n], Sampling(12, t, seed=3)) for n, t in ((200, 0.0), (240, 0.9), (129, 0.0), (260, 0.8), (256, 0.0))]


@cache
def model() -> Model:
    return small.model(CFG)


def paged(page_size: int) -> Model:
    """The same model on pages of that size."""
    layout = replace(model().layout, page_size=page_size)
    return replace(model(), layout=layout, addresses=layout.addresses())


@cache
def alone(prefill: str = "full") -> list[list[int]]:
    return [Bench(model(), prefill=prefill).run(ask)[0] for ask in ASKS]


class Letters:
    """Arrive at the reader's next turn."""

    def __init__(self):
        self.boxes: dict[str, list[Letter]] = defaultdict(list)

    def of(self, name: str) -> "Letters.End":
        return Letters.End(self, name)

    class End:
        def __init__(self, letters: "Letters", name: str):
            self.letters, self.name = letters, name

        def send(self, to: str, letter: Letter) -> None:
            self.letters.boxes[to].append(letter)

        def take(self) -> list[Letter]:
            taken, self.letters.boxes[self.name] = self.letters.boxes[self.name], []
            return taken


class Rack:
    """Engines P and D, and the least of a router: what P hands over goes to D."""

    def __init__(self, rules: Rules = RULES, speculate: bool = False, decode: dict | None = None, **serve):
        self.time, self.letters, self.fault = 0.0, Letters(), Fault()
        self.fabric = Fabric(lambda: self.time, fault=lambda *_: self.fault)
        self.answers: dict[int, Answer] = {}
        self.asks: dict[int, Ask] = {}
        self.held_up: list[Handed] | None = None  # a list: handoffs stay there
        speculation = Speculation(**serve.pop("speculation", {}))
        both = replace(SERVE, handoff=rules, speculation=speculation, **serve)
        self.prefill, self.to_prefill = self.engine("P.0", both, speculate)
        self.decode, self.to_decode = self.engine("D.0", replace(both, **(decode or {})), speculate)

    def engine(self, name: str, serve: Serve, speculate: bool):
        mail = Mailbox(self.deliver)
        ties = Ties(LocalLink(self.fabric, name), self.letters.of(name), 1, "small")
        return engine_on(
            runner_of(paged(serve.page_size), serve), serve, speculate, mail, now=lambda: self.time, ties=ties
        ), mail

    @property
    def engines(self):
        return self.prefill, self.decode

    def ask(self, tokens: np.ndarray, sampling: Sampling) -> int:
        handle = len(self.asks) + 1
        sizes = {e.scheduler.serve.page_size for e in self.engines}
        hashes = chain(tokens, *sizes) if len(sizes) == 1 else []  # hashes are of pages of one size
        ask = Ask(handle, np.asarray(tokens, np.int32), hashes, sampling, hand_over=True)
        self.asks[handle], self.answers[handle] = ask, Answer()
        self.to_prefill.send(ask)
        return handle

    def abort(self, handle: int) -> None:
        for mail in (self.to_prefill, self.to_decode):
            mail.send(Abort(handle))

    def deliver(self, out: Outputs) -> None:
        for handle, tokens, _ in out.each():
            assert self.answers[handle].finish is None
            self.answers[handle].tokens += tokens
        for finish in out.finished:
            assert self.answers[finish.handle].finish is None, "finished twice"
            self.answers[finish.handle].finish = finish
        for handed in out.handed:
            if self.held_up is None:
                self.forward(handed)
            else:
                self.held_up.append(handed)

    def forward(self, handed: Handed) -> None:
        generated = np.array(self.answers[handed.handle].tokens, np.int32)
        ask = replace(self.asks[handed.handle], hand_over=False, handoff=handed.handoff, generated=generated)
        self.to_decode.send(ask)

    def turn(self) -> None:
        async def go() -> None:
            for engine in self.engines:
                await engine.step()
                engine.exchange.check()

        self.time += 0.01
        asyncio.run(go())

    def drain(self, most: int = 4000) -> None:
        """Until every request has ended and everything lent is back."""
        for _ in range(most):
            self.turn()
            if all(a.finish for a in self.answers.values()) and self.idle:
                return
        raise AssertionError(f"not idle: {[h for h, a in self.answers.items() if not a.finish]} are open")

    @property
    def idle(self) -> bool:
        return all(
            e.scheduler.idle and e._next is None and e.exchange.transfer.idle and not e.scheduler.pages.used
            for e in self.engines
        )

    def run(self, *asks) -> list[list[int]]:
        handles = [self.ask(*a) for a in asks]
        self.drain()
        return [self.answers[h].tokens for h in handles]


WAYS = [
    {},
    {"rules": replace(RULES, mode="push"), "overlap": 1, "long_prefill_tokens": 17},
    {"rules": replace(RULES, window="halo")},
    {"speculate": True, "overlap": 1, "window": "halo"},
    {"window": "retain", "overlap": 1, "decode": {"max_batch": 2, "budget_tokens": 20}},
    {"page_size": 128, "decode": {"page_size": 64}},
]
MORE_WAYS = [
    {"rules": replace(RULES, mode="push")},
    {"rules": replace(RULES, max_kv_loads_per_step=1), "decode": {"max_batch": 3}},
    {"speculate": True},
    {"overlap": 1, "long_prefill_tokens": 17},
    {"window": "retain"},
    {"decode": {"pages": 9}},
    {"decode": {"page_size": 128, "pages": 20}},
]
ALL_WAYS = WAYS + [pytest.param(how, marks=pytest.mark.slow) for how in MORE_WAYS]


@pytest.mark.medium
@pytest.mark.parametrize("how", ALL_WAYS, ids=str)
def test_disaggregated_as_colocated(how):
    r = Rack(**how)
    assert r.run(*ASKS) == alone()
    assert r.run(*ASKS) == alone(), "again, with what both sides have cached"
    counts = r.prefill.exchange.transfer.lender.counts
    assert counts["lent"] == counts["dropped"] == 2 * len(ASKS) and not r.letters.boxes["nobody"]
    assert r.decode.exchange.transfer.sink.ends["landed"] == 2 * len(ASKS)


@pytest.mark.medium
@pytest.mark.parametrize("prefill", ["decoder_replay", "layer20_replay"])
def test_late_layers_that_prefill_skips_are_no_matter_to_decode(prefill):
    assert Rack(prefill=prefill).run(*ASKS) == alone(prefill)


def test_one_token_needs_no_handoff():
    r = Rack()
    assert r.run((BASE[:70], Sampling(1))) == [Bench(model()).run((BASE[:70], Sampling(1)))[0]]
    assert not r.prefill.exchange.transfer.lender.counts["lent"]


def test_prompt_logprobs_and_logprobs_come_once():
    sampling = Sampling(6, logprobs=2, prompt_logprobs=1)
    r, told = Rack(), []
    deliver = r.deliver

    def listen(out: Outputs) -> None:
        told.extend((rows.chosen, rows.ids) for rows in out.prompt_logprobs.values())
        deliver(out)

    r.to_prefill._deliver = r.to_decode._deliver = listen
    r.run((BASE[:100], sampling))
    assert sum(len(chosen) for chosen, _ in told) == 99


@pytest.mark.parametrize("fallback", ["recompute", "fail"])
def test_a_load_that_fails_is_recomputed_or_told(fallback):
    r = Rack(replace(RULES, fallback=fallback))
    r.fault = Fault(fails=True)
    got = r.run(*ASKS)
    if fallback == "recompute":
        assert got == alone()
    else:
        handed = [a for a in r.answers.values() if a.finish.reason == "error"]
        assert len(handed) == len(ASKS) and all("the handoff failed" in a.finish.message for a in handed)


def test_a_handoff_that_nobody_forwards_comes_back():
    r = Rack()
    r.held_up = []
    r.ask(*ASKS[5])
    while not r.held_up:
        r.turn()
    assert r.prefill.scheduler.pages.used
    r.abort(1)
    r.turn()
    assert not r.prefill.scheduler.pages.used and r.prefill.exchange.transfer.lender.counts["revoked"] == 1
    r.ask(*ASKS[6])
    while len(r.held_up) < 2:
        r.turn()
    r.time += RULES.lease_s + RULES.grace_s + 1
    r.turn()
    assert r.prefill.exchange.transfer.lender.counts["expired"] == 1 and not r.prefill.exchange.lent
    r.forward(r.held_up[1])
    while not r.answers[2].finish:
        r.turn()
    assert r.answers[2].tokens == alone()[6], "computed again by the decode side"


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_time_leave_nothing_behind(seed):
    rng = Random(seed)
    mode = replace(RULES, mode=rng.choice(("pull", "push")))
    r = Rack(mode, overlap=seed % 2, window=rng.choice(("none", "halo", "retain")))
    r.fabric.cost = lambda size, spans: 0.03
    handles = []
    for _ in range(3):
        handles += [r.ask(*a) for a in ASKS]
        for _ in range(30):
            r.turn()
            if rng.random() < 0.4:
                r.abort(rng.choice(handles))
    for _ in range(1500):  # a request aborted between two engines is told by neither
        r.turn()
        if r.idle:
            break
    assert r.idle
    for handle in handles:
        want = alone()[(handle - 1) % len(ASKS)]
        assert r.answers[handle].tokens == want[: len(r.answers[handle].tokens)]


def test_an_engine_without_ties_says_so():
    b = Bench(model())
    b.mail.send(Ask(1, np.zeros(3, np.int32), [], Sampling(2), hand_over=True))
    b.answers[1] = Answer()
    b.steps(1)
    assert "serve=disagg" in b.answers[1].finish.message
