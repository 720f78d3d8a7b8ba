"""Lists of spans: what is cut and merged moves the same bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel import spans
from parallel.port import SpanError


def bytes_of(pair: spans.Pair) -> dict[tuple[int, int], tuple[int, int]]:
    """(region, place) of each byte of the second list -> that of the first."""
    out = {}
    for (ra, oa, na), (rb, ob, nb) in zip(*(side.tolist() for side in pair), strict=True):
        assert na == nb > 0
        for i in range(na):
            assert (rb, ob + i) not in out, "a byte twice"
            out[rb, ob + i] = (ra, oa + i)
    return out


@st.composite
def page_pairs(draw):
    count = draw(st.integers(1, 12))
    unique = st.lists(st.integers(0, 20), min_size=count, max_size=count, unique=True)
    size = draw(st.integers(1, 5))
    return tuple(spans.records(draw(st.integers(0, 1)), np.array(draw(unique)), size) for _ in range(2))


@given(page_pairs(), st.one_of(st.none(), st.integers(1, 12)))
def test_merge_moves_the_same_bytes_in_as_few_spans_as_can_be(pair, most):
    merged = spans.merge(*pair, most)
    assert bytes_of(merged) == bytes_of(pair)
    if most is not None:
        assert merged[0][:, 2].max() <= most
        return
    a, b = merged
    joins = [(side[1:, 0] == side[:-1, 0]) & (side[1:, 1] == side[:-1, 1] + side[:-1, 2]) for side in (a, b)]
    assert not (joins[0] & joins[1]).any()


def test_merge_of_one_run_is_one_span():
    a, b = spans.merge(spans.records(0, np.arange(5, 105)[::-1], 890), spans.records(1, np.arange(100)[::-1], 890))
    assert a.tolist() == [[0, 5 * 890, 89000]] and b.tolist() == [[1, 0, 89000]]


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_cells_of_large_pages_match_small_pages(count, parts, shares):
    """A page of `parts` times as many tokens, cut in parts, has the planes of that many small pages."""
    small, large = np.array(shares), np.array(shares) * parts
    a = spans.cells(0, np.arange(count), large, parts)
    b = spans.cells(0, np.arange(count * parts), small, 1)
    assert (a[:, 2] == b[:, 2]).all()
    assert len(bytes_of((a, b))) == count * large.sum()


def test_cells_refuse_planes_that_do_not_divide():
    with pytest.raises(SpanError, match="cannot be cut into 2"):
        spans.cells(0, np.array([1]), np.array([4, 3]), 2)


def test_posts_are_bounded():
    a = spans.records(0, np.arange(0, 20, 2), 1)
    assert [len(p[0]) for p in spans.posts(a, a, 4)] == [4, 4, 2]
