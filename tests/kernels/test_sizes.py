"""Padded sizes: hold what they must, waste little, are few."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.sizes import padded


def test_what_they_are():
    assert sorted({padded(n, 8) for n in range(1, 257)}) == [*range(8, 129, 8), *range(144, 257, 16)]
    assert sorted({padded(n, octave=4) for n in range(1, 33)}) == [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32]
    assert sorted({padded(n, octave=1) for n in range(1, 65)}) == [1, 2, 4, 8, 16, 32, 64]
    assert padded(0, 8) == 0


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 4, 8]))
def test_they_hold_the_count_and_little_more(count, multiple, octave):
    size = padded(count, multiple, octave)
    assert size >= count and size % multiple == 0 and padded(size, multiple, octave) == size
    assert size <= -(-count // multiple) * multiple * (1 + 1 / octave)


@pytest.mark.parametrize(("most", "few"), [(512, 32), (855_000, 2 * 13 * 8)])
def test_they_are_few(most, few):
    assert len({padded(n, 8) for n in range(1, most + 1)}) <= few
