"""What a prefix hit does about windows, and the store of rings."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.request import Abort
from serve.schedule.windows import WINDOWS, Resume, Tails, WindowRule
from serve.settings import Serve
from tests.serve.drive import Loop, ask, scheduler


@given(st.sampled_from(WINDOWS), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_a_resume_computes_all_that_its_windows_need(mode, window, layers, cached):
    rule = WindowRule(mode, window, layers)
    got = rule.resume(cached)
    if got == Resume():
        assert mode == "none" or cached <= {"replay": window + 1, "halo": window * layers + 1}.get(mode, 0)
        return
    assert got.cached == cached and 0 <= got.start <= cached
    spans = {"replay": window, "halo": layers * window, "retain": 0}
    assert spans[mode] <= cached - got.start <= spans[mode] + 1 and (cached - got.start) % 2 == 0
    assert got.floor == (0 if mode == "retain" else got.start)


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="must be one of none, replay, halo, retain, got 'some'"):
        WindowRule("some", 4, 2)
    with pytest.raises(ValueError, match=r"retain needs serve\.retained >= 1"):
        Serve(64, 8, 2, window="retain", retained=0)
    assert [Serve(64, 8, 2, window=w, retained=3).slots for w in ("retain", "replay")] == [5, 2]
    with pytest.raises(ValueError, match="retain stores whole rings"):
        Serve(64, 8, 2, window="retain", prefill="decoder_replay")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=40), st.integers(0, 4))
def test_the_store_is_a_bounded_lru(moves, room):
    """Against a list, the one used longest ago first. Prompts are rows of names that begin apart."""
    tails, model, slots = Tails(range(room)), [], {}
    for prompt, pages, look in moves:
        names = [bytes([prompt, n]) for n in range(6)]
        if look:
            want = max((n for p, n in model if p == prompt and n <= pages), default=0)
            assert tails.longest(names, pages) == want
            if want:
                assert tails.slot(names[want - 1]) == slots[prompt, want]
                model.append(model.pop(model.index((prompt, want))))
            continue
        slot = tails.store(names[pages - 1], pages)
        if (prompt, pages) in model:
            assert slot is None
            model.remove((prompt, pages))
        elif not room:
            assert slot is None
            continue
        else:
            if len(model) == room:
                assert slot == slots.pop(model.pop(0))
            slots[prompt, pages] = slot
        model.append((prompt, pages))
        assert len(set(slots.values())) == len(slots) <= room


def retaining(overlap: bool = False, **sizes) -> tuple[Loop, dict]:
    """A loop, and the messages that are to arrive at its moments."""
    mail: dict[str, list] = {"first": [], "planned": [], "flying": []}
    arrive = lambda moment: [mail[moment].pop()] if mail[moment] else []  # noqa: E731
    return Loop(scheduler(window="retain", **sizes), random.Random(0), overlap, arrive), mail


def test_rings_are_kept_at_the_end_of_a_prompts_last_full_page_and_found_there():
    loop, _ = retaining(retained=2)
    loop.add(ask(1, range(11), max_tokens=1))
    loop.run()
    loop.add(ask(2, [*range(8), 40, 41, 42, 43, 44], max_tokens=1))
    loop.run()
    loop.judge()
    assert loop.finished[2].cached_tokens == 8 and loop.finished[2].replayed_tokens == 0


def test_a_store_slot_that_is_read_and_given_away_in_one_turn_is_read_first():
    """Between two steps the only stored rings go to 3 and then make room for those of 2: in this order."""
    loop, mail = retaining(overlap=True, retained=1, long_prefill_tokens=4)
    loop.add(ask(1, range(5), max_tokens=1))
    loop.run()
    loop.add(ask(2, range(20, 29), max_tokens=1))  # its first stretch ends a page
    mail["planned"] = [ask(3, range(6), max_tokens=4)]
    seen = []
    while not loop.idle:
        plan = loop.step()
        seen += plan.copies if plan is not None else []
    loop.judge()
    store = loop.s.serve.max_batch + 1
    assert loop.finished[3].cached_tokens == 4
    assert [c.source == store for c in seen[:2]] == [True, False] and seen[1].target == store


def test_copies_outlive_a_step_that_nobody_is_left_for():
    """The rings of 1 are to be stored before the next step, and its only sequence is aborted before the launch: without
    the copy, 3 would go on from an empty store."""
    loop, mail = retaining(retained=2)
    loop.add(ask(1, range(4), max_tokens=1))
    loop.run()
    assert len(loop.s.residents._copies) == 1
    loop.add(ask(2, range(30, 40), max_tokens=1))
    mail["planned"] = [Abort(2)]
    assert len(loop.step()) == 0
    loop.add(ask(3, range(6), max_tokens=2))
    loop.run()
    loop.judge({2})
    assert loop.finished[3].cached_tokens == 4
