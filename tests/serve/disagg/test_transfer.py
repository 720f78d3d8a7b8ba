"""Transfers between engines without a model (tests/serve/disagg/rack.py): each failure of docs/FAILURES.md, section A,
by its number, and what the fuzz does not name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.cache import Layout
from parallel.local import Fault, LocalLink
from serve.disagg.card import mismatch
from serve.disagg.copies import Counts, Place, between
from serve.disagg.handoff import Beat, Beaten, Greet, Landed, Lost, Pushed, Returned, Rules, Welcome
from serve.disagg.pools import card
from serve.disagg.transfer import Transfer
from serve.schedule.pages import chain
from serve.schedule.windows import WindowRule
from tests.serve.disagg.rack import CARD, PAGE, POISON, RULES, End, Rack, lent, push, rack
from tests.small import config

WIDE = replace(CARD, page_size=2 * PAGE, planes=tuple(2 * n for n in CARD.planes))
MODES = pytest.mark.parametrize("rules", [RULES, push()], ids=["pull", "push"])


def reached(engine, peer: str) -> bool:
    """Whether the handshake with ``peer`` is done."""
    known = engine.transfer.peers.known.get(peer)
    return known is not None and known.state == "open"


def settled(r: Rack) -> dict[int, str]:
    r.until(r.quiet)
    return r.ended


def sent(r: Rack, kind: type) -> list:
    return [body for _, _, body in r.channels.sent if isinstance(body, kind)]


@MODES
def test_requests_land_with_pages_rings_and_first_token(rules):
    r, P, D = rack(rules)
    for tokens in (1, 63, 64, 65, 200):
        r.send(P, D, tokens)
    r.until(lambda: len(D.running) == 5)
    assert all(ready.resume.start == len(ready.ask.tokens) for ready, _ in D.running.values())
    assert set(settled(r).values()) == {"landed"}
    assert r.clock() < RULES.lease_s, "released by expiry, not by the decode side"
    assert P.transfer.lender.counts == {"lent": 5, "dropped": 5, "expired": 0, "revoked": 0}


# Section A, by number.


@MODES
def test_failure_1_a_load_of_a_dead_engine_ends_and_late_completions_are_ignored(rules):
    r, P, D = rack(rules, cost=lambda size, n: 1.0)
    first, _ = r.send(P, D)
    second, _ = r.send(P, D)
    r.until(
        lambda: D.transfer.sink.loads and all(x.state in ("copying", "ordered") for x in D.transfer.sink.loads.values())
    )
    assert D.abort(first.handle)
    r.end(first.handle, "aborted")
    r.crash("P")
    r.until(lambda: len(r.ended) == 2, 2 * RULES.timeout_s)
    assert "lost" in r.ended[second.handle] and "P" in r.ended[second.handle]
    r.until(r.quiet, 2 * RULES.quarantine_s, 0.5)
    late = D.transfer.sink.ends["ignored"]
    for order in (1, 2, 99):
        D.transfer.sink.pushed(("P", 1), Pushed(order, ""), r.clock())
    assert D.transfer.sink.ends["ignored"] == late + 3 and D.quiet


@MODES
def test_failure_2_a_request_refused_on_arrival_gives_its_lease_up(rules):
    r, P, D = rack(rules)
    ask = r.ask(30 * PAGE)
    handoff = P.prefill(ask.handle, 20 * PAGE)
    assert "its handoff 1280" in D.loads.add(lent(ask, handoff), r.clock())
    huge = replace(handoff, tokens=30 * PAGE, lease=handoff.lease)
    r.until(r.quiet, RULES.lease_s / 2)
    assert P.transfer.lender.counts["dropped"] == 1
    ask2, handoff = r.ask(30 * PAGE), replace(huge, lease=P.prefill(1, 64).lease)
    assert "it can never fit" in D.loads.add(lent(ask2, handoff), r.clock())
    r.until(r.quiet, RULES.lease_s / 2)
    assert P.transfer.lender.counts["dropped"] == 2 and P.transfer.lender.counts["expired"] == 0


def test_failure_3_a_lease_outlives_a_long_queue_as_it_is_kept_from_arrival():
    r, P, D = rack(RULES)
    D.slots.clear()  # no room to load
    r.send(P, D)
    r.until(lambda: r.clock() > 4 * RULES.lease_s, 100)
    assert P.transfer.lender.leases and not r.ended
    D.slots.extend(range(6, 0, -1))
    assert settled(r) == {1: "landed"}


def test_failure_3_what_was_read_after_the_lease_lapsed_is_never_served():
    """Beats are lost while a slow read goes on: the prefill side frees, another request takes the pages."""
    r, P, D = rack(RULES, cost=lambda size, n: 15.0)
    r.send(P, D)
    r.until(lambda: any(x.state == "copying" for x in D.transfer.sink.loads.values()))
    r.channels.delay = lambda sender, to, letter: None if isinstance(letter.body, Beat) else 0.01
    r.until(lambda: not P.lent)
    P.prefill(999, 24 * PAGE)
    r.until(lambda: 1 in r.ended)
    assert "lapsed" in r.ended[1] and D.transfer.sink.ends["lapsed"] == 1
    r.channels.delay = lambda sender, to, letter: 0.01
    settled(r)


def test_failure_3_a_read_that_stopped_halfway_is_not_served_when_answers_come_again():
    """Found by the fuzz: trust lapsed between two posts, the rest was not posted, and then trust was back."""
    r, P, D = rack(replace(RULES, max_descriptors=1), cost=lambda size, n: 3.0)
    r.send(P, D, 3 * PAGE)
    r.until(lambda: any(x.state == "copying" for x in D.transfer.sink.loads.values()))
    begin = r.clock()
    r.channels.delay = lambda sender, to, letter: None if isinstance(letter.body, Beaten) else 0.01
    r.until(lambda: r.clock() > begin + RULES.lease_s)
    r.channels.delay = lambda sender, to, letter: 0.01
    r.until(lambda: r.ended)
    assert "lapsed" in r.ended[1] and P.transfer.lender.counts["expired"] == 0
    settled(r)


def test_failure_3_an_expired_lease_is_refused_and_one_lease_has_one_holder():
    r, P, D = rack(RULES)
    E = r.add("E", rules=RULES)
    ask, late = r.ask(100), P.prefill(1, 100)
    r.until(lambda: not P.lent)
    assert not D.loads.add(lent(ask, late), r.clock())
    r.until(lambda: 1 in r.ended)
    assert "holds lease 1 no more" in r.ended[1]
    ask, handoff = r.send(P, D)
    r.tags[3] = ask.handle
    r.turn()
    r.turn()
    assert not E.loads.add(lent(r.ask(100), handoff), r.clock())
    r.until(lambda: len(r.ended) == 3)
    assert r.ended[2] == "landed" and "no more" in r.ended[3]
    settled(r)


def test_failure_4_a_write_that_cannot_be_posted_is_told():
    r, P, D = rack(push())
    P.transfer.link.post = None  # as good as any error of ours
    r.send(P, D)

    def broken(*args, **more):
        from parallel.port import LinkError

        raise LinkError("no memory for a post")

    P.transfer.link.post = broken
    r.until(lambda: r.ended, 5)
    assert "no memory for a post" in r.ended[1]
    settled(r)


@MODES
def test_failure_4_one_failed_post_of_many_fails_the_load_at_once(rules):
    posted = []

    def third_fails(op, link, peer):
        posted.append(op)
        return Fault(0.01, fails=len(posted) == 3)

    r, P, D = rack(replace(rules, max_descriptors=1), fault=third_fails)
    r.send(P, D, 5 * PAGE)
    r.until(lambda: r.ended, 5)
    assert "failed" in r.ended[1] and len(posted) == 3
    settled(r)
    assert r.clock() < RULES.lease_s


@MODES
def test_failure_5_pages_of_an_aborted_load_are_kept_until_nobody_writes_to_them(rules):
    r, P, D = rack(rules, cost=lambda size, n: 5.0)
    ask, _ = r.send(P, D)
    r.until(lambda: any(x.state in ("copying", "ordered") for x in D.transfer.sink.loads.values()))
    for _ in range(5):
        r.turn()
    used = D.pages.used
    assert D.abort(ask.handle)
    r.end(ask.handle, "aborted")
    r.turn()
    assert D.pages.used == used and D.transfer.sink.draining
    before = r.clock()
    settled(r)
    assert 1 < r.clock() - before < RULES.lease_s, "by acknowledgement, not by timeout"


def test_failure_5_without_an_answer_they_come_back_after_the_quarantine():
    r, P, D = rack(push(), cost=lambda size, n: 1.0)
    ask, _ = r.send(P, D)
    r.until(lambda: any(x.state == "ordered" for x in D.transfer.sink.loads.values()))
    r.channels.delay = lambda sender, to, letter: None
    assert D.abort(ask.handle)
    begin = r.clock()
    r.until(lambda: D.quiet, 2 * RULES.quarantine_s)
    assert r.clock() - begin >= RULES.quarantine_s and D.transfer.sink.ends["quarantined"] == 1
    r.until(lambda: P.quiet, 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2), ("model", "other"), ("storage", "plain"), ("dtype", "bfloat16"), ("page_size", 96),
        ("planes", (24, 8, 11, 5)), ("rings", 4), ("ring_size", 9), ("slot", (40, 16, 9)),
    ],
)  # fmt: skip
def test_failure_6_a_layout_that_differs_is_refused_by_name_before_anything_is_read(field, value):
    r = Rack()
    P, D = r.add("P", card=replace(CARD, **({field: value} if field != "page_size" else {}))), r.add("D")
    if field == "page_size":
        assert "page_size 64 here, 96 there" in mismatch(CARD, replace(CARD, page_size=96))
        return
    r.send(P, D)
    r.until(lambda: r.ended, 5)
    assert all(text in r.ended[1] for text in (f"{field} {value}", str(getattr(CARD, field)), "does not fit"))
    assert D.transfer.counts.posts == 0 and not reached(D, "P")
    settled(r)


@MODES
@pytest.mark.parametrize("wide", ["P", "D"])
def test_failure_6_page_sizes_and_page_counts_may_differ(rules, wide):
    r = Rack()
    P, D = (
        r.add(n, card=WIDE if n == wide else CARD, rules=rules, pages=p, slots=s)
        for n, p, s in (("P", 20, 5), ("D", 33, 4))
    )
    for tokens in (1, 64, 65, 128, 129, 300):
        if P.slots and tokens:
            r.send(P, D, tokens)
    assert set(settled(r).values()) == {"landed"}


@settings(max_examples=12)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 6 * PAGE), st.integers(0, 2), st.data())
def test_failure_7_every_byte_has_one_source_whatever_the_page_sizes(left, right, tokens, skip, data):
    """There are no heads to slice: a row is whole on every rank. Spans cover each cell of a request once."""
    places = []
    for parts in (left, right):
        c = replace(CARD, page_size=parts * PAGE, planes=tuple(parts * n for n in CARD.planes))
        need = -(-tokens // c.page_size)
        pages = data.draw(st.lists(st.integers(1, 30), min_size=need, max_size=need, unique=True))
        places.append(Place(c, np.array(pages), data.draw(st.integers(1, 3))))
    size = max(left, right) * PAGE
    begin = min(skip, (tokens - 1) // size) * size
    (here, there), pieces = between(*places, tokens, begin, with_slot=True)
    assert len(here) <= pieces
    size = min(left, right) * PAGE
    cells = (-(-tokens // size) * size - begin) // PAGE
    assert here[:, 2].sum() == there[:, 2].sum() == cells * CARD.page_bytes + sum(CARD.slot)
    for side in (here, there):
        taken = [(region, at + i) for region, at, n in side.tolist() for i in range(n)]
        assert len({*taken}) == len(taken)


def test_failure_8_descriptors_are_merged_bounded_and_counted():
    r, P, D = rack(replace(RULES, max_descriptors=3))
    r.send(P, D, 20 * PAGE)
    settled(r)
    counts = D.transfer.counts
    assert counts.pieces == 23 and counts.descriptors == 4 and counts.posts == 2  # fresh pages are one run
    assert D.transfer.stats()["transfer_descriptors_total"] == 4
    D.pages.take(9)
    scattered = np.array([3, 9, 4, 20, 21, 22]), np.array([11, 3, 12, 7, 8, 9])
    pair, pieces = between(*(Place(CARD, p, 1) for p in scattered), 6 * PAGE, 0, with_slot=False)
    assert (len(pair[0]), pieces) == (3, 6)


@MODES
def test_failure_9_loads_count_as_running_and_at_most_four_begin_in_a_step(rules):
    r, P, D = rack(rules, cost=lambda size, n: 0.3)
    Q = r.add("Q", rules=rules, slots=10, pages=40)
    sends = [r.send(e, D, 10) for e in [Q] * 9 + [P] * 3]
    begun = []
    while len(r.ended) < 12:
        r.turn()
        begun.append(D.begun)
        assert len(D.loads.loading) + len(D.running) <= 6
        if len(D.running) + len(D.loads._landed) == 6:
            D.finish(min(D.running))
    assert max(begun) == 4 and sum(begun) == 12 and sends
    settled(r)


def test_failure_9_a_finished_load_is_given_out_though_the_next_request_does_not_fit():
    r, P, D = rack()
    r.send(P, D, 10 * PAGE)
    r.until(lambda: D.loads.loading)
    big, _ = r.send(P, D, 14 * PAGE)
    small, _ = r.send(r.add("Q"), D, 10)
    r.until(lambda: D.running, 2)
    assert [*D.loads.waiting] == [big.handle, small.handle], "nobody passes one that waits for pages"
    D.finish(1)
    assert set(settled(r).values()) == {"landed"}


def test_failure_10_loaded_requests_hold_what_one_step_needs():
    r = Rack()
    P, D = r.add("P", pages=40), r.add("D", pages=6, reserve=5)
    for _ in range(4):
        r.send(P, D, PAGE)  # two pages each with the reserve, though the prompt fills one
    r.until(lambda: len(D.running) == 3)
    for ready, _ in D.running.values():
        assert len(ready.pages) == 2
    assert len(D.loads.waiting) == 1 and D.pages.free == 0
    assert not D.loads.admit(0, 0, r.clock())
    D.finish(min(D.running))
    r.turn()
    assert not D.loads.admit(promised=1, after=0, now=r.clock()), "pages promised to local prefills are not taken"
    assert set(settled(r).values()) == {"landed"}


def test_failure_11_pages_that_a_step_in_flight_may_write_to_are_not_loaded_into_before_it_is_done():
    r, P, D = rack()
    r.send(P, D)
    D.lag = 1000  # no step ends
    for _ in range(20):
        r.turn()
    assert D.transfer.counts.posts == 0 and reached(D, "P")
    D.lag = 0
    r.turn()
    assert D.transfer.counts.posts == 1
    settled(r)


def test_failure_12_the_gate_is_the_handshake_and_a_fresh_engine_is_greeted_until_it_answers():
    r, P, D = rack()
    r.channels.delay = lambda sender, to, letter: None
    r.send(P, D)
    for _ in range(30):
        r.turn()
    assert D.transfer.counts.posts == 0 and not reached(D, "P")
    r.channels.delay = lambda sender, to, letter: 0.01
    assert settled(r) == {1: "landed"} and sent(r, Welcome) and reached(D, "P")


@MODES
def test_a_handoff_that_comes_twice_is_loaded_once(rules):
    """Found by the fuzz: kept again while the first request's drop was on its way, it was trusted and freed."""
    r, P, D = rack(rules)
    r.channels.delay = lambda sender, to, letter: 0.5
    ask, handoff = r.send(P, D)
    assert not D.loads.add(lent(r.ask(100), handoff), r.clock())
    r.until(lambda: ask.handle in D.running)
    assert not D.loads.add(lent(r.ask(100), handoff), r.clock())
    assert settled(r)[1] == "landed" and all("another request's" in r.ended[n] for n in (2, 3))


# Restarts, losses, books.


@MODES
def test_a_restarted_prefill_engine_fails_loads_at_once_and_serves_new_ones(rules):
    r, P, D = rack(rules, cost=lambda size, n: 1.0)
    r.send(P, D)
    r.until(lambda: any(x.state in ("copying", "ordered") for x in D.transfer.sink.loads.values()))
    r.crash("P")
    P = r.add("P", rules=rules)
    begin = r.clock()
    r.until(lambda: r.ended, 2 * RULES.beat_s)
    assert "lost" in r.ended[1] and r.clock() - begin < RULES.timeout_s
    r.send(P, D)
    assert settled(r)[2] == "landed"


@MODES
def test_a_restarted_decode_engine_frees_what_its_earlier_life_held(rules):
    r, P, D = rack(rules)
    D.slots.clear()
    r.send(P, D)
    r.until(lambda: any(lease.holder for lease in P.transfer.lender.leases.values()))
    r.end(1, "crashed")
    r.crash("D")
    D = r.add("D", rules=rules)
    r.send(P, D)
    assert settled(r)[2] == "landed"
    assert r.clock() < RULES.lease_s and P.transfer.lender.counts["dropped"] == 2


@MODES
@pytest.mark.parametrize("lost", [Greet, Welcome, Beat, Beaten, Pushed])
def test_any_letter_may_be_lost_once(rules, lost):
    r, P, D = rack(rules)
    dropped = []

    def delay(sender, to, letter):
        if isinstance(letter.body, lost) and not dropped:
            dropped.append(letter)
            return None
        return 0.01

    r.channels.delay = delay
    r.send(P, D)
    assert settled(r) == {1: "landed"}
    assert r.clock() < RULES.lease_s and (dropped or lost is Pushed)


def test_prefixes_found_at_the_decode_side_are_not_sent():
    r, P, D = rack()
    tokens = np.arange(5 * PAGE, dtype=np.int32)
    names = chain(tokens, PAGE)
    mine = D.pages.take(3)
    D.pages.publish(mine.tolist(), names[:3])
    ask = replace(r.ask(5 * PAGE), hashes=names)
    D.loads.add(lent(ask, P.prefill(1, 5 * PAGE)), r.clock())
    D.memory[0][mine] = P.memory[0][P.lent[0][0][:3]]
    D.running[0] = type("Held", (), {"pages": mine})(), 0
    r.until(lambda: 1 in D.running)
    ready = D.running[1][0]
    assert ready.cached == 3 and (ready.pages[:3] == mine).all() and (D.pages.refs[mine] == 2).all()
    assert D.transfer.counts.bytes == 2 * CARD.page_bytes + sum(CARD.slot)


@pytest.mark.parametrize(
    ("window", "tokens", "resume"),
    [("replay", 100, (92, 100, 92)), ("halo", 101, (92, 101, 92)), ("replay", 5, (0, 5, 0))],
)
def test_windows_that_are_not_sent_are_rebuilt(window, tokens, resume):
    r = Rack()
    rules = replace(RULES, window=window)
    P, D = r.add("P", rules=rules), r.add("D", rules=rules)
    D.loads.rebuild = WindowRule(window, 8, 1)
    r.send(P, D, tokens)
    r.until(lambda: D.running)
    got = D.running[1][0].resume
    assert (got.start, got.cached, got.floor) == resume
    assert (D.memory[1] == POISON).all(), "rings were sent"
    settled(r)


def test_a_handoff_is_taken_back_unless_somebody_has_asked():
    r, P, D = rack()
    handoff = P.prefill(1, 10)
    assert P.transfer.revoke(handoff) and not P.transfer.revoke(handoff)
    r.turn()
    assert P.quiet
    _, handoff = r.send(P, D)
    r.turn()
    r.turn()
    assert not P.transfer.revoke(handoff)
    settled(r)


def test_events_come_once():
    r, P, D = rack()
    r.send(P, D)
    seen = []
    for engine in (P, D):
        poll = engine.transfer.poll
        engine.transfer.poll = lambda *a, poll=poll: [seen.append(type(e)) or e for e in poll(*a)]
    settled(r)
    for _ in range(50):
        r.turn()
    assert sorted(k.__name__ for k in seen) == ["Landed", "Returned"] and Lost not in seen and Landed and Returned


def test_an_engine_and_its_link_have_one_name():
    r = Rack()
    with pytest.raises(ValueError, match="engine P has a link named L"):
        Transfer("P", 1, CARD, LocalLink(r.fabric, "L"), End(r.channels, "P"), RULES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "pul"}, "handoff.mode must be one of pull, push"),
        ({"window": "none"}, "handoff.window"),
        ({"max_kv_loads_per_step": 0}, "max_kv_loads_per_step must be >= 1"),
        ({"beat_s": 20.0}, "lease_s 30.0 must be >= 2"),
        ({"quarantine_s": 5.0}, r"quarantine_s must be >= 2 \* \(lease_s \+ grace_s\) = 70.0"),
        ({"retry_s": 0}, "retry_s must be > 0"),
    ],
)
def test_rules_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        Rules(**changes)


@pytest.mark.parametrize("storage", ["plain", "packed"])
def test_the_card_of_a_layout_counts_its_bytes(storage):
    """Copying what the card says from one cache to another moves every pool's bytes of a page and a slot."""
    layout, dtype = Layout(config(), storage), torch.float32
    c = card(layout, dtype, "tiny")
    assert c.page_bytes == layout.page_bytes(dtype) and sum(c.slot) == layout.slot_bytes(dtype)
    caches = [layout.allocate(5, 3, dtype) for _ in "ab"]
    pools = [(x.pages, x.rings, x.tails, x.tokens) for x in caches]
    raw = [[p.view(-1).view(torch.uint8).numpy() for p in side] for side in pools]
    for pool in raw[0]:
        pool[:] = np.random.default_rng(0).integers(0, 256, len(pool), np.uint8)
    pair, _ = between(Place(c, np.array([2, 3]), 1), Place(c, np.array([4, 1]), 2), 2 * layout.page_size, 0, True)
    for (region, at, n), (_, there, _) in zip(*(side.tolist() for side in pair)):
        raw[1][region][at : at + n] = raw[0][region][there : there + n]
    page, sizes = c.page_bytes, c.slot
    assert (raw[1][0][2 * page : 3 * page] == raw[0][0][4 * page : 5 * page]).all()
    assert (raw[1][0][3 * page : 4 * page] == raw[0][0][page : 2 * page]).all()
    for (a, b), size in zip(list(zip(raw[1], raw[0]))[1:], sizes):
        assert (a[size : 2 * size] == b[2 * size : 3 * size]).all() and not a[2 * size :].any()
    assert Counts().copies == 0
