"""AgentX lanes under virtual time: exactly N live trees, joins, caps, warm-up, and the same bytes in every run."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from serve.clock import LoopClock
from serve.load.agenda import Agenda, Caps
from serve.load.drive import Driver
from serve.load.filler import Scale
from serve.load.lanes import Lanes, LaneSettings, primers
from serve.load.records import Session, Subagent, Turn, runs_of
from serve.load.synthetic import SessionShape, sessions
from serve.load.trees import tree
from tests.serve.load.virtual import VOCAB, FakeClient, play

ONE = Scale(64, 1)


def turn(start_s, think_s=0.0, call_s=1.0, blocks=4, first=0):
    return Turn(start_s, blocks * 64, 64, runs_of(np.arange(first, first + blocks)), call_s, think_s)


def run(made, settings, duration_s=1e4, drain_s=100.0, client=None, **limits):
    client = client or FakeClient(per_prompt=0.0, per_token=1.0)

    async def go():
        driver = Driver(client, LoopClock(), page_size=4, **limits)
        trees = [tree(s, settings.scale) for s in made]
        lanes = Lanes(trees, settings, driver, LoopClock(), VOCAB)
        await lanes.run(duration_s, drain_s)
        return lanes

    return play(go()), client


FREE = Caps()


def whole(lanes=1, caps=FREE, **more):
    """Trees from their beginning, with nothing before them."""
    return LaneSettings(lanes, ONE, caps, 42, (0.0, 0.0), 0, **more)


def sent(lanes, session=None):
    """(seconds since the warm-up, turn) of the counted requests."""
    rows = [r for r in lanes.driver.records if not r.warmup and (session is None or r.session == session)]
    return [(round(r.sent_s - lanes.begin_s, 6), r.turn) for r in rows]


MANY = sessions(np.random.default_rng(3), 12, SessionShape(turns=(12, 0.5), subagents=0.6, old=(20_000, 0.5)))
MINE = LaneSettings(4, ONE, Caps(10.0, 300.0), 42)


@pytest.fixture(scope="module")
def played():
    return run(MANY, MINE, 2000.0)


def test_exactly_n_trees_are_live(played):
    lanes, _ = played
    begin, last = lanes.begin_s, max(r.end_s for r in lanes.driver.records if r.end_s)
    assert len(lanes.played) > 8 and Counter(p.end_s is None for p in lanes.played)[True] == 4
    for lane in range(4):
        mine = [p for p in lanes.played if p.lane == lane]
        assert mine[0].begin_s <= begin and mine[-1].end_s is None
        assert all(a.end_s == b.begin_s for a, b in pairwise(mine))  # a tree follows at once, never before
    for p in lanes.played:  # a tree is drained when it makes place
        own = [r for r in lanes.driver.records if r.session.split("/")[0] == p.session and r.lane == p.lane]
        own = [r for r in own if p.begin_s <= r.sent_s and r.sent_s < (p.end_s or last)]
        assert all((r.end_s or last) <= (p.end_s or last + 200) for r in own)


def test_two_runs_send_the_same_bytes(played):
    _, client = played
    assert run(MANY, MINE, 2000.0)[1].bytes() == client.bytes()
    assert run(MANY, replace(MINE, seed=1), 2000.0)[1].bytes() != client.bytes()


def test_no_idle_stretch_over_the_cap(played):
    lanes, _ = played
    spans = sorted((r.sent_s, r.end_s) for r in lanes.driver.records if r.end_s)
    busy_until, worst = spans[0][1], 0.0
    for a, b in spans:
        worst, busy_until = max(worst, a - busy_until), max(busy_until, b)
    assert 9.9 < worst <= 10.0 + 1e-6
    assert lanes.agenda.capped_s["system"] > 0 and lanes.agenda.capped_s["tree"] > 0


def test_sessions_are_drawn_without_repetition_in_a_round(played):
    lanes, _ = played
    first = [p.session for p in lanes.played][: len(MANY)]
    assert len(set(first)) == len(first)


# --- think time and caps ---


def test_think_time_goes_from_end_to_start():
    s = Session("s", 64, 0, (turn(0), turn(3, 2.0), turn(1000, 996.0)))
    lanes, _ = run([s], whole(), 1500.0)
    # the warm-up plays turn 0, the run begins at the recorded start: 3 s to turn 1, then a call of 1 s and 996 s
    assert sent(lanes)[:2] == [(3.0, 1), (1000.0, 2)]


def test_recorded_starts_stand_in_for_a_missing_think_time():
    s = Session("s", 64, 0, (turn(0), turn(3, None), turn(9, None)))
    assert sent(run([s], whole(), 15.0)[0])[:2] == [(3.0, 1), (9.0, 2)]


def test_tree_cap_moves_every_timer_of_the_tree():
    inner = Subagent(500.0, "a", True, 0, (turn(0, first=50), turn(101, 100.0, first=50)))
    s = Session("s", 64, 0, (turn(0), inner, turn(400, 399.0), turn(1000, 599.0)))
    lanes, _ = run([s], whole(caps=Caps(None, 300.0)), 850.0)
    # idle from 0 to 400 becomes 300, so the subagent due at 500 comes at 400; idle 602-1000 is cut to 300 as well
    assert sent(lanes)[:4] == [(300.0, 3), (400.0, 1), (501.0, 2), (802.0, 4)]
    assert lanes.agenda.capped_s["tree"] >= 100.0 and lanes.agenda.capped_s["system"] == 0


def test_system_cap_counts_only_when_nothing_runs():
    quiet = Session("quiet", 64, 0, (turn(0), turn(100, 99.0)))
    lanes, _ = run([quiet], whole(2, Caps(10.0)), 30.0)
    assert sent(lanes)[:2] == [(10.0, 1), (10.0, 1)]
    assert lanes.agenda.capped_s["system"] >= 90.0
    busy = FakeClient(per_prompt=0.0, per_token=200.0)
    lanes, _ = run([quiet], whole(2, Caps(10.0)), 150.0, client=busy)
    assert sent(lanes)[:2] == [(10.0, 1), (10.0, 1)]


def test_gap_cap_bounds_each_wait():
    s = Session("s", 64, 0, (turn(0), turn(50, 49.0), turn(55, 4.0), turn(100, 44.0)))
    lanes, _ = run([s], whole(caps=Caps(gap_s=10.0)), 40.0)
    assert sent(lanes)[:3] == [(10.0, 1), (15.0, 2), (26.0, 3)]


def test_time_scale():
    s = Session("s", 64, 0, (turn(0), turn(41, 40.0), turn(82, 40.0)))
    lanes, _ = run([s], LaneSettings(1, Scale(64, 1, 0.1), Caps(), 0, (0.0, 0.0), 0), 20.0)
    assert sent(lanes)[:2] == [(4.1, 1), (9.1, 2)]


# --- subagents ---


def agents(background):
    inner = Subagent(4.0, "a", background, 0, (turn(0, first=50), turn(101, 100.0, first=50)))
    return Session("s", 64, 0, (turn(0), turn(2, 1.0), inner, turn(10, 7.0), turn(15, 4.0)))


def test_a_join_gates_the_next_turn():
    lanes, _ = run([agents(False)], whole(), 140.0)
    assert sent(lanes, "s/a")[:2] == [(4.0, 2), (105.0, 3)]
    assert sent(lanes, "s")[:3] == [(2.0, 1), (106.0, 4), (111.0, 5)]


def test_background_gates_nothing_but_the_tree():
    lanes, _ = run([agents(True)], whole(), 140.0)
    assert sent(lanes, "s")[:3] == [(2.0, 1), (10.0, 4), (15.0, 5)]
    assert sent(lanes, "s/a")[:2] == [(4.0, 2), (105.0, 3)]
    assert lanes.played[0].end_s - lanes.begin_s == pytest.approx(106.0)


@pytest.mark.parametrize("subagents", ["shared", "isolated"])
def test_namespace_of_subagents(subagents):
    inner = Subagent(4.0, "a", False, 0, (turn(0, blocks=8),))
    s = Session("s", 64, 0, (turn(0, blocks=8), inner, turn(10, 7.0, blocks=8)))
    _, client = run([s], whole(subagents=subagents), 20.0)
    root, child = client.requests[0], next(r for r in client.requests if r.session == "s/a")
    assert (root.tokens.tolist() == child.tokens.tolist()) == (subagents == "shared")
    assert root.affinity == child.affinity


# --- warm-up ---


def test_warm_up_is_a_barrier(played):
    lanes, client = played
    warm = [r for r in lanes.driver.records if r.warmup]
    assert max(r.end_s for r in warm) == lanes.begin_s <= min(r.sent_s for r in lanes.driver.records if not r.warmup)
    assert all(r.max_tokens == 1 for r in client.requests if r.warmup)
    per_lane = Counter(r.lane for r in warm)
    assert sorted(per_lane) == [0, 1, 2, 3] and all(1 <= n <= 10 + 6 for n in per_lane.values())


def test_a_lane_goes_on_where_its_warm_up_ended(played):
    _, client = played
    for lane in range(4):
        own = [r for r in client.requests if r.lane == lane]
        session = own[0].session
        roots = [(r.turn, r.warmup) for r in own if r.session == session]
        turns = [t for t, _ in roots][: sum(w for _, w in roots) + 1]
        assert turns == sorted(turns) and len(set(turns)) == len(turns)


def test_starts_lie_between_a_quarter_and_three_quarters():
    lanes, _ = run(MANY, replace(MINE, lanes=8, warmup_requests=0), 1.0)
    by_name = {s.name: tree(s, ONE) for s in MANY}
    for p in lanes.played[:8]:
        made = by_name[p.session]
        last = max(r.turn for r in lanes.driver.records if r.warmup and r.lane == p.lane and r.session == p.session)
        assert made.steps[last].start_s <= 0.75 * made.session.duration_s
        following = [s.start_s for s in made.root.steps() if s.number > last]
        assert not following or following[0] > 0.25 * made.session.duration_s


def test_primers_of_live_streams():
    made = tree(agents(False), ONE)
    past = np.array([s.start_s <= 50 for s in made.steps])
    assert [s.number for s in made.steps if past[s.number]] == [0, 1, 2, 4, 5]
    assert [s.number for s in primers(made, past)] == [2, 5]


def test_a_failed_root_warm_up_aborts():
    client = FakeClient(fails=lambda r: "no room" if r.lane == 2 else "")
    with pytest.raises(ValueError, match=r"warm-up of lane 2 failed, session synthetic_\d+: no room"):
        run(MANY, MINE, 100.0, client=client)
    assert client.open == 0


def test_each_play_has_prompts_of_its_own(played):
    _, client = played
    by_play = {}
    for r in client.requests:
        by_play.setdefault(r.affinity, []).append(r)
    assert len({(len(r[0].tokens), r[0].tokens.tobytes()) for r in by_play.values()}) == len(by_play)


# --- ends ---


def test_nothing_starts_after_the_end_and_all_is_drained():
    lanes, client = run(MANY, MINE, 50.0, drain_s=1000.0)
    assert client.open == 0 and all(r.end_s is not None for r in lanes.driver.records)
    assert max(r.sent_s for r in lanes.driver.records) <= lanes.begin_s + 50.0


def test_what_does_not_drain_in_time_is_cut():
    client = FakeClient(per_prompt=0.0, per_token=30.0)
    lanes, _ = run(MANY, MINE, 50.0, drain_s=1.0, client=client)
    assert client.open == 0 and any(r.usage is None for r in lanes.driver.records)


def test_limit_of_requests():
    lanes, _ = run(MANY, MINE, 1e5, max_requests=25)
    assert sum(not r.warmup for r in lanes.driver.records) == 25


def test_an_error_in_the_client_ends_the_run():
    def fails(request):
        if not request.warmup:
            raise RuntimeError("a slip")
        return ""

    with pytest.raises(RuntimeError, match="a slip"):
        run(MANY, MINE, 1e5, client=FakeClient(fails=fails))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes": 0}, "lanes must be >= 1, got 0"),
        ({"start": (0.5, 0.2)}, "start must be two shares"),
        ({"warmup_requests": -1}, "warmup_requests must be >= 0"),
        ({"subagents": "own"}, "subagents must be one of shared, isolated, got 'own'"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MINE, **changes)


def test_trees_leave_out_what_is_too_long():
    made = [tree(s, ONE, 300) for s in MANY]
    assert sum(t.dropped for t in made) > 0
    fits = [s.turn for t in made for s in t.steps]
    assert all(ONE.prompt(t.input_tokens) + ONE.output(t.output_tokens) <= 300 for t in fits)
    with pytest.raises(ValueError, match="no session is left to play"):
        Lanes([tree(s, ONE, 1) for s in MANY], MINE, None, LoopClock(), VOCAB)


def test_agenda_without_caps_waits_as_told():
    async def go():
        agenda = Agenda(LoopClock(), Caps())
        clockwork = LoopClock().spawn(agenda.run())
        woke = []

        async def stream(lane, due):
            me = agenda.begin(lane)
            await agenda.until(lane, due)
            woke.append((lane, LoopClock().now()))
            agenda.end(me)

        tasks = [LoopClock().spawn(stream(lane, due)) for lane, due in ((0, 50.0), (1, 20.0), (2, 20.0), (0, 5.0))]
        for task in tasks:
            await task
        agenda.close()
        await clockwork
        return woke

    assert play(go()) == [(0, 5.0), (1, 20.0), (2, 20.0), (0, 50.0)]
