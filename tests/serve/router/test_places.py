"""Where requests go: prefixes, sessions, load, and the bounds of what is remembered."""

from dataclasses import replace

import numpy as np
import pytest

from serve.request import Ask, Sampling
from serve.router.choice import RouterRules
from serve.router.memory import Sent, Sessions
from tests.serve.router.rack import PAGE, Rack

RULES = RouterRules(slack_tokens=0, request_tokens=0)
THREE = {"engine": ("both", 3, 1)}
APART = {"prefill": ("prefill", 3, 1), "decode": ("decode", 3, 1)}


def prompt(n: int, first: int = 4) -> np.ndarray:
    return np.arange(first, first + n)


def started(rules=RULES, pools=THREE) -> Rack:
    rack = Rack(pools, rules)
    rack.start()
    return rack


def placed(rack: Rack, tokens: np.ndarray, session: str = "", end: bool = True) -> list[str]:
    """The engines of one request, which is over afterwards if ``end``."""
    handle, before = len(rack.told) + 1, len(rack.sent)
    rack.ask(handle, tokens, Sampling(2), session)
    if end:
        rack.play()
    return [name for name, message in rack.sent[before:] if isinstance(message, Ask)]


def test_the_longest_prefix_wins():
    rack = started()
    a, b = prompt(8 * PAGE), np.concatenate([prompt(4 * PAGE), prompt(4 * PAGE, 200)])
    (first,) = placed(rack, a)
    (second,) = placed(rack, prompt(8 * PAGE, 300))
    assert first != second, "what nobody has goes to who was sent least"
    (third,) = placed(rack, b)
    assert third == first, "half of it is there"
    assert placed(rack, np.concatenate([b, prompt(40, 100)])) == [first]
    assert placed(rack, prompt(8 * PAGE, 300)) == [second]


def test_a_prefix_is_worth_no_more_than_the_work_before_it():
    rack = started()
    (first,) = placed(rack, prompt(8 * PAGE))
    placed(rack, np.concatenate([prompt(8 * PAGE), prompt(20 * PAGE, 100)]), end=False)
    assert rack.sent[-1][0] == first
    assert placed(rack, prompt(8 * PAGE), end=False) != [first], "80 tokens wait there, 32 would be computed here"
    rack = started(replace(RULES, affinity_weight=10.0))
    (first,) = placed(rack, prompt(8 * PAGE))
    placed(rack, np.concatenate([prompt(8 * PAGE), prompt(20 * PAGE, 100)]), end=False)
    assert placed(rack, prompt(8 * PAGE), end=False) == [first]


def test_open_requests_count_too():
    rack = started(replace(RULES, request_tokens=50))
    names = [placed(rack, prompt(8 * PAGE), end=False)[0] for _ in range(6)]
    assert {names.count(n) for n in names} == {2}


def test_a_dead_engine_has_no_prefixes():
    rack = started()
    (first,) = placed(rack, prompt(8 * PAGE))
    rack.kill(first[:-2])
    rack.start(first[:-2])
    assert placed(rack, prompt(8 * PAGE)) != [first], "it was sent more than the others"


def test_a_session_stays_unless_its_engine_is_overloaded():
    rack = started(replace(RULES, policy="load", slack_tokens=30), APART)
    names = placed(rack, prompt(10), "s", end=False)
    assert placed(rack, prompt(10, 50), "s", end=False) == names, "20 tokens are open there, 0 elsewhere"
    assert placed(rack, prompt(25, 90), "s", end=False) == names
    assert placed(rack, prompt(10, 150), "s", end=False) != names, "45 are"
    rack.play()
    before = placed(rack, prompt(10), "t")
    assert len(before) == 2 and placed(rack, prompt(10, 70), "t") == before, "at both engines"


def test_round_robin_knows_no_session():
    rack = started(replace(RULES, policy="round_robin", slack_tokens=1000))
    assert sorted(placed(rack, prompt(10), "s")[0] for _ in range(6)) == sorted(2 * list(rack.engines))


def test_decode_goes_to_the_least_loaded():
    rack = started(pools=APART)
    for n in (30, 10, 20, 5):
        placed(rack, prompt(n, n), end=False)
    for name in [n for n, _ in rack.sent]:
        rack.step(name)
    held = {m.name: m.tokens for m in rack.router.fleet if m.post.role == "decode"}
    assert sorted(held.values()) == [11, 27, 31], "the last to be handed over, of 21, joined the least, of 6"


def test_memory_is_bounded_and_keeps_first_pages():
    sent = Sent(4)
    a, b = [bytes([i]) for i in range(3)], [bytes([9])]
    sent.add(a, 0)
    sent.add(a[:2], 1)
    assert sent.runs(a) == {0: 3, 1: 2} and sent.runs([]) == {} and sent.runs(b) == {}
    sent.add(b, 1)
    sent.add([bytes([8])], 2)
    assert len(sent) == 4 and sent.runs(a) == {0: 2, 1: 2}, "the last page went first"
    sent.forget(0)
    assert sent.runs(a) == {1: 2}
    sessions = Sessions(2)
    for name in ("a", "b", "a", "c", ""):
        sessions.put(name, name)
    assert len(sessions) == 2 and sessions.get("b") is None and sessions.get("a") == "a"


def test_bad_settings_are_refused():
    for change, message in (({"policy": "best"}, "policy must be one of affinity, load"), ({"retries": -1}, "retries"),
                            ({"pages": 0}, "pages"), ({"wait_s": float("nan")}, "wait_s")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            RouterRules(**change)
