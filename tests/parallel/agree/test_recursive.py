"""Recursive doubling, ranks interleaved in one process: equal results, rounds, ranks ahead, missing ranks, dirty
rows."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.agree.recursive import LINE, STAGES, blame, rounds_of, unsealed
from tests.parallel.agree.board import Table


@pytest.mark.parametrize("size", range(1, 65))
def test_all_get_the_rows_of_all_in_any_order(size):
    table = Table(size, 3, seed=size)
    steps = 3 if size <= 16 or size in (33, 64) else 1
    table.play(steps)
    assert all(len(r) == steps for r in table.results)
    table.check()


def test_sum_of_rows_is_the_all_reduce():
    table = Table(6, 4)
    table.play(1)
    total = np.sum([table.row(r, 1) for r in range(6)], axis=0)
    assert all((results[0].sum(0) == total).all() for results in table.results)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 64])
def test_rounds_are_log2_and_two_more_where_ranks_are_folded(size):
    """Counted: in a sweep every rank goes on once and sees only what the others had posted before it. The first
    posts."""
    table = Table(size, 2)
    for rank in range(size):
        table.begin(rank)
    words, marks, sweeps = table.board.words, range(0, size * LINE, LINE), 0
    while any(table.running):
        before = {at: words[at] for at in marks}
        after = dict(before)
        for rank in range(size):
            words[rank * LINE] = after[rank * LINE]
            if table.running[rank] is not None:
                table.turn(rank)
            after[rank * LINE], words[rank * LINE] = words[rank * LINE], before[rank * LINE]
        for at in marks:
            words[at] = after[at]
        sweeps += 1
    folded = size != 1 << (size.bit_length() - 1)
    assert rounds_of(size) == math.floor(math.log2(size)) + 2 * folded
    assert math.ceil(math.log2(size)) <= sweeps - 1 <= rounds_of(size)
    table.check()


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_a_rank_can_be_one_step_ahead_and_no_more(size):
    for fast in range(size):
        table = Table(size, 2)
        others = [r for r in range(size) if r != fast]
        table.turn(fast)
        for _ in range(50):  # all have brought step 1; the fast one is done with it and has begun step 2
            for r in others:
                if not table.results[r]:
                    table.turn(r)
            table.turn(fast)
        assert len(table.results[fast]) == 1 and table.step[fast] == 2
        table.play(3)
        table.check()


def test_slow_reader_still_finds_its_rows_when_the_others_are_a_step_on():
    """Rank 0 has all of step 1 posted for it but has not read; the others go as far as they can."""
    table = Table(4, 2)
    table.begin(0)
    next(table.running[0])  # its row is there, it waits for rank 1
    for _ in range(200):
        for r in (1, 2, 3):
            if len(table.results[r]) < 2:
                table.turn(r)
    assert [len(r) for r in table.results] == [0, 0, 0, 0] or table.results[0] == []
    table.play(3)
    table.check()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_missing_ranks_are_named_by_all_whatever_the_hops(size):
    for absent in itertools.chain.from_iterable(itertools.combinations(range(size), k) for k in range(1, size)):
        table = Table(size, 1)
        table.play(1)
        present = [r for r in range(size) if r not in absent]
        table.play(2, present, turns=60 * size)
        assert all(len(table.results[r]) == 1 for r in present)
        assert all(blame(table.board, r, 2) == list(absent) for r in present)


@pytest.mark.parametrize("size", [4, 6, 8, 13, 32])
def test_a_rank_that_stops_halfway_is_named_by_all(size):
    for stopped in range(size):
        table = Table(size, 1, seed=stopped)
        table.turn(stopped)  # it arrives, and never goes on
        others = [r for r in range(size) if r != stopped]
        table.play(1, others, turns=40 * size)
        stuck = [r for r in others if not table.results[r]]
        assert all(blame(table.board, r, 1) == [stopped] for r in stuck)
        if stopped < table.board.base:
            assert stuck
        else:  # a folded rank gives its row and is not needed any more in this step, but in the next
            table.play(2, others, turns=40 * size)
            assert not stuck and all(blame(table.board, r, 2) == [stopped] for r in others)


@given(st.data())
def test_idle_ranks_late_joins_and_aborts(data):
    """Ranks begin whenever they like; one may abort in the middle of a step. All others end or can name it."""
    size = data.draw(st.integers(2, 12))
    table = Table(size, 2, seed=data.draw(st.integers(0, 2**32)))
    late = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    table.play(1, [r for r in range(size) if r not in late], turns=data.draw(st.integers(0, 200)))
    table.play(2)
    quitter, turns = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 4))
    for _ in range(turns):
        if len(table.results[quitter]) == 2:
            table.turn(quitter)
    others = [r for r in range(size) if r != quitter]
    table.play(3, others, turns=40 * size)
    table.check()
    for r in others:
        assert len(table.results[r]) == 3 or blame(table.board, r, 3) == [quitter]


def test_failure_23_a_dirty_row_is_read_again_until_it_is_right():
    """A row that was seen too early, or in part: the reader's copy heals from its source, and all results are right."""
    table = Table(8, 2, seed=3)
    rows, hurt = table.seats[5].rows[1], 0
    while not all(table.results):
        rank = int(table.rng.integers(8))
        if len(table.results[rank]) == 0:
            table.turn(rank)
        for other in range(8):
            if other != 5 and rows[other].any() and hurt < 6 and not table.results[5]:
                rows[other, 1 + hurt % 3] ^= 1 << 17
                hurt += 1
    assert hurt == 6
    table.check()


def test_failure_23_a_row_overwritten_by_another_is_never_taken():
    table = Table(4, 2)
    table.begin(2)
    next(table.running[2])
    table.seats[2].rows[1][2, 3] += 1  # where rank 2 wrote its own row
    table.play(1, turns=2000)
    assert not any(table.results[r] for r in range(4))
    assert all(unsealed(seat, 1) == [2] for seat in table.seats)
    assert all(blame(table.board, r, 1) == [] for r in range(4))


def test_failure_20_a_row_of_another_step_is_never_taken():
    """Progress of an older step does not satisfy a wait, and a row sealed for another step does not pass."""
    table = Table(2, 1)
    table.play(2)
    table.begin(0)
    assert next(table.running[0]) == 1
    table.board.words[1 * LINE] = 3 * STAGES + 1  # rank 1 claims step 3 with the row of step 1
    for _ in range(20):
        next(table.running[0])
    assert unsealed(table.seats[0], 3) == [1]


def test_bad_rows_and_ranks_are_refused():
    table = Table(2, 3)
    with pytest.raises(ValueError, match="a row has 3 words here, got 2"):
        table.seats[0].put(1, [1, 2], 0)
    with pytest.raises(TypeError):
        table.seats[0].put(1, [1, 2, None], 0)
    with pytest.raises(ValueError, match="ranks must be 1 to"):
        Table(0, 1)
