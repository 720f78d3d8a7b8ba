"""The router: two phases, retries, aborts in every state, waiting, strangers, and random lives of engines."""

import random
from dataclasses import replace

import numpy as np
import pytest

from serve.request import Abort, Ask, Finish, Outputs, Sampling
from serve.router.choice import POLICIES, RouterRules
from tests.serve.router.rack import BOTH, PD, VOCAB, Rack

RULES = RouterRules()
ONE = {"prefill": ("prefill", 1, 1), "decode": ("decode", 1, 1)}
LONG = Sampling(40)


def prompt(n: int = 12, first: int = 4) -> np.ndarray:
    return np.arange(first, first + n)


def started(pools=ONE, rules=RULES, **how) -> Rack:
    rack = Rack(pools, rules, **how)
    rack.start()
    return rack


def asks(rack: Rack, name: str) -> list[Ask]:
    return [m for to, m in rack.sent if to.startswith(name) and isinstance(m, Ask)]


def aborts(rack: Rack, name: str) -> list[int]:
    return [m.handle for to, m in rack.sent if to.startswith(name) and isinstance(m, Abort)]


def ended(rack: Rack, handle: int = 1) -> Finish:
    rack.verify(handle)
    rack.idle()
    return rack.told[handle].finish


def test_a_prompt_is_computed_here_and_decoded_there():
    rack = started()
    rack.ask(1, prompt(), replace(LONG, logprobs=2, prompt_logprobs=1))
    rack.play()
    (first,), (second,) = asks(rack, "prefill"), asks(rack, "decode")
    assert first.hand_over and first.handoff is None and not len(first.generated)
    assert second.handoff.engine == "prefill0.0" and second.generated.tolist() == rack.told[1].tokens[:1]
    assert not second.hand_over and first.handle != second.handle
    finish = ended(rack)
    assert (finish.reason, finish.cached_tokens, finish.replayed_tokens) == ("length", 6, 1), "those of the prefill"


def test_one_token_needs_no_second_engine():
    rack = started()
    rack.ask(1, prompt(), Sampling(1))
    rack.play()
    assert ended(rack).reason == "length" and not asks(rack, "decode")


@pytest.mark.parametrize(("dead", "does"), [("prefill0", "decode"), ("decode0", "prefill")])
def test_one_kind_of_engine_does_both(dead, does):
    rack = started()
    rack.kill(dead)
    rack.ask(1, prompt(), LONG)
    rack.play()
    (ask,) = asks(rack, does)
    assert not ask.hand_over and ask.handoff is None and ended(rack).reason == "length"


def test_the_decode_engine_dies_while_the_prompt_is_computed():
    rack = started()
    rack.ask(1, prompt(), LONG)
    rack.kill("decode0")
    rack.step("prefill0.0")
    assert len(asks(rack, "prefill")) == 2 and not asks(rack, "prefill")[1].hand_over
    rack.play()
    assert ended(rack).reason == "length" and aborts(rack, "prefill"), "what was lent is taken back"


def after_prefill(pools=ONE, rules=RULES, sampling=LONG) -> Rack:
    rack = started(pools, rules)
    rack.ask(1, prompt(), sampling)
    rack.step(next(name for name, _ in rack.sent))
    return rack


def test_a_death_of_the_prefill_engine_does_not_touch_what_decodes_elsewhere():
    rack = after_prefill()
    rack.kill("prefill0")
    rack.play()
    assert len(rack.sent) == 2 and ended(rack).reason == "length"


def test_a_death_of_the_decode_engine_is_a_retry_from_the_prompt_on():
    rack = after_prefill({**ONE, "decode": ("decode", 2, 1)})
    name = rack.sent[-1][0]
    rack.step(name)
    rack.kill(name[:-2])
    again = asks(rack, "prefill")[1]
    assert again.hand_over and again.generated.tolist() == rack.told[1].tokens and len(aborts(rack, "prefill")) == 1
    rack.play()
    assert ended(rack).reason == "length" and rack.router.counts["retried"] == 1


def test_retries_end():
    rack = started({"engine": ("both", 1, 1)}, replace(RULES, retries=1))
    rack.ask(1, prompt(), LONG)
    for _ in range(2):
        rack.kill("engine0")
        assert not rack.told[1].tokens
        rack.start()
    finish = ended(rack)
    assert finish.reason == "error" and finish.unavailable and finish.message == "engine0 died (tried 2 times)"


def test_what_has_all_its_tokens_is_finished_not_retried():
    rack = started({"engine": ("both", 2, 1)})
    rack.ask(1, prompt(), LONG)
    (name, ask) = rack.sent[0]
    tokens = np.array(rack.want(1)[0], np.int32)
    rack.router.deliver(name, Outputs(np.array([ask.handle]), np.array([len(tokens)]), tokens))
    rack.kill(name[:-2])
    assert ended(rack).reason == "length" and len(rack.sent) == 1


def test_rows_of_the_prompt_come_once():
    rack = started({"engine": ("both", 2, 1)})
    rack.ask(1, prompt(), Sampling(5, logprobs=1, prompt_logprobs=1))
    name = rack.sent[0][0]
    rack.step(name)
    rack.step(name)
    assert rack.told[1].rows == 6 and not rack.told[1].tokens
    rack.kill(name[:-2])
    rack.play()
    assert rack.told[1].rows == 11 and ended(rack).reason == "length"


# --- aborts ---


def test_an_abort_in_either_phase():
    for steps in range(3):
        rack = started()
        rack.ask(1, prompt(), LONG)
        for name in ("prefill0.0", "decode0.0")[:steps]:
            rack.step(name)
        rack.router.send(Abort(1))
        rack.router.send(Abort(1))
        rack.play(2)
        assert ended(rack).reason == "abort"


def test_an_abort_that_crosses_a_handover():
    rack = started()
    rack.ask(1, prompt(), LONG)
    engine = rack.engines["prefill0.0"]
    engine.step()
    rack.router.send(Abort(1))
    rack.router.deliver("prefill0.0", engine.mailbox.told.pop())
    assert ended(rack).reason == "abort" and not asks(rack, "decode")


def test_an_abort_that_its_engine_does_not_live_to_see():
    rack = after_prefill()
    rack.router.send(Abort(1))
    rack.kill("decode0")
    assert ended(rack).reason == "abort" and not rack.engines["prefill0.0"].lent


def test_unknown_and_finished_handles_may_be_aborted():
    rack = started()
    rack.router.send(Abort(5))
    rack.ask(1, prompt(), Sampling(1))
    rack.play()
    rack.router.send(Abort(1))
    assert not aborts(rack, "")


# --- nobody is there ---


def test_a_request_waits_for_an_engine_and_not_for_ever():
    rack = Rack(ONE, replace(RULES, wait_s=10.0))
    for handle in (1, 2, 3):
        rack.ask(handle, prompt(), LONG)
        rack.now += 4
    rack.router.send(Abort(2))
    rack.router.tick()
    assert [rack.told[h].finish and rack.told[h].finish.reason for h in (1, 2, 3)] == ["error", "abort", None]
    assert rack.told[1].finish.unavailable and "no engine is up" in rack.told[1].finish.message
    rack.start()
    rack.play()
    assert ended(rack, 3).reason == "length"


def test_nobody_waits_where_nobody_comes():
    for rules in (replace(RULES, wait_s=0.0), RULES):
        rack = Rack(ONE, rules)
        rack.start()
        rack.ask(1, prompt(), LONG)
        for group in ("prefill0", "decode0"):
            rack.kill(group)
        rack.router.give_up("the last engine is gone")
        rack.ask(2, prompt(), LONG)
        assert all(rack.told[h].finish.reason == "error" for h in (1, 2))
        assert rack.told[2].finish.message == "the last engine is gone" and ended(rack).unavailable


def test_a_router_before_engines_that_work_for_an_earlier_one_stops_them():
    """They must not decode for nobody for ever, and what they say of it is not taken for news of other requests."""
    rack = started()
    for handle in (1, 2):
        rack.ask(handle, prompt(first=4 * handle), LONG)
        rack.step("prefill0.0")
    rack.ask(3, prompt(), LONG)
    rack.engines["prefill0.0"].step()  # lent, and told to nobody
    rack.told.clear()
    rack.connect(RULES, first=1000)
    rack.ask(4, prompt(), LONG)
    rack.play()
    rack.step("prefill0.0")
    assert rack.router.counts["strangers"] >= 3 and ended(rack, 4).reason == "length"


# --- anything in any order ---


@pytest.mark.parametrize("seed", range(40))
def test_anything_in_any_order_ends_once_with_its_own_tokens(seed):
    draw = random.Random(seed)
    policy = draw.choice(list(POLICIES))
    rules = RouterRules(policy, pages=20, sessions=3, retries=draw.choice([0, 2, 50]), wait_s=draw.choice([0.0, 5.0]))
    rack = started(draw.choice([PD, ONE, BOTH, {**PD, **BOTH}]), rules, seed=seed)
    most, handle = draw.choice([1, 20]), 0
    for _ in range(400):
        rack.now += 1
        rack.router.tick()
        what = draw.random()
        if what < 0.25 and len(rack.open) < most:
            handle += 1
            s = Sampling(draw.randint(1, 30), draw.choice([0.0, 1.0]), draw.randrange(9), (draw.randrange(4, VOCAB),))
            k = draw.choice([None, 0, 2])
            s = replace(s, logprobs=k, prompt_logprobs=draw.choice([None, k]))
            rack.ask(
                handle, prompt(draw.randint(1, 30), 4 * draw.randint(1, 3)), s, draw.choice(["", "a", "b", "c", "d"])
            )
        elif what < 0.3 and handle:
            rack.router.send(Abort(draw.randint(1, handle)))
        elif what < 0.35:
            group = draw.choice(rack.groups)
            (rack.kill if rack.up(group) else rack.start)(group)
        elif rack.engines:
            rack.step(draw.choice(list(rack.engines)), repeat=draw.random() < 0.3)
        rack.router.check()
    for group in rack.groups:
        if not rack.up(group):
            rack.start(group)
    rack.play()
    for one in rack.told:
        rack.verify(one)
    rack.idle()
