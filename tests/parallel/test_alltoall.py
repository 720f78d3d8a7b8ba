"""alltoall against allgather against one rank: the same bits for any routing, fewer bytes moved."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.moe import grouped_mlp
from parallel import alltoall, expert
from parallel.traffic import Traffic
from tests import ranks

DIM, WIDE, PAD, TABLE = 64, 32, 16, 23


def drawn(cases: st.SearchStrategy, count: int) -> list[Any]:
    """So many examples, the same each time: processes start once for all of them."""
    out: list[Any] = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None)
    @given(cases)
    def note(case: Any) -> None:
        out.append(case)

    note()
    return out


@st.composite
def routings(draw: st.DrawFn, size: int) -> dict:
    """Rows of each rank, some with none; experts a rank; how many of them are ever chosen; how often no expert is."""
    held = draw(st.integers(1, 4))
    return {
        "rows": draw(st.lists(st.sampled_from((0, 1, 2, 7, 33)), min_size=size, max_size=size)),
        "held": held,
        "k": draw(st.integers(1, min(3, held * size))),
        "hot": draw(st.integers(1, held * size)),
        "none": draw(st.sampled_from((0.0, 0.3, 1.0))),
        "seed": draw(st.integers(0, 2**20)),
    }


def routing(case: dict, rows: int, total: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    slots = torch.rand(rows, total, generator=g)
    slots[:, case["hot"] :] -= 1  # chosen only where there are not enough others
    slots = slots.topk(case["k"]).indices
    slots[torch.rand(rows, generator=g) < case["none"]] = total
    return torch.randn(rows, DIM, generator=g), slots, torch.rand(rows, case["k"], generator=g)


def compare(ep: Any, cases: list[dict]) -> list[tuple[int, int]]:
    """Bytes by either way for each case, after the results were found equal to those of one rank."""
    out = []
    for case in cases:
        total = case["held"] * ep.size
        g = torch.Generator().manual_seed(case["seed"])
        w1, w3, w2 = (torch.randn(total, *s, generator=g) / 8 for s in ((WIDE, DIM), (WIDE, DIM), (DIM, WIDE)))
        x, slots, weights = routing(case, case["rows"][ep.rank], total, case["seed"] + 1 + ep.rank)
        cut = slice(ep.rank * case["held"], (ep.rank + 1) * case["held"])

        def mlp(rows, ids, share, w=(w1[cut], w3[cut], w2[cut])):
            return grouped_mlp(rows, ids, share, w[0], None, w[1], None, w[2], None, 10.0, False, PAD)

        want = mlp(x, slots, weights, (w1, w3, w2))
        with Traffic(ep.rank) as moved:
            got = alltoall.routed(ep, case["held"], x, slots, weights, mlp)
        assert got.shape == want.shape and torch.equal(got, want), case
        most = max(case["rows"])
        fill = lambda t, value, n=most: torch.cat((t, t.new_full((n - len(t), t.shape[1]), value)))  # noqa: E731
        with Traffic(ep.rank) as everything:
            rows, ids, share = expert.dispatch(ep, fill(x, 0), fill(slots, total), fill(weights, 0))
            got = expert.combine(ep, mlp(rows, expert.local(ep, ids, case["held"]), share))
        assert torch.equal(got[: len(x)], want), case
        out.append((moved.bytes, everything.bytes))
    fetch(ep, [[5, 0, 40, 1], [0] * 4, [1] * 4, [0, 300, 0, 0]])
    return out


def fetch(ep: Any, counts: list[list[int]]) -> None:
    """Table rows come from whoever has them, in the order of the ids."""
    table = torch.randn(TABLE, 3, generator=torch.Generator().manual_seed(0))
    held = -(-TABLE // ep.size)
    mine = table[ep.rank * held : (ep.rank + 1) * held]
    for seed, rows in enumerate(counts):
        ids = torch.randint(0, TABLE, (rows[ep.rank],), generator=torch.Generator().manual_seed(seed * 9 + ep.rank))
        assert torch.equal(alltoall.fetched(ep, held, ids, mine.__getitem__), table[ids])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_routing_has_the_bits_of_allgather_and_of_one_rank(size):
    cases = drawn(routings(size), 40)
    assert any(0 in c["rows"] for c in cases) and any(c["none"] == 1 for c in cases)
    got = ranks.run(size, compare, cases)
    for case, moved in zip(cases, zip(*got, strict=True), strict=True):
        counts = 16 * (size - 1) * size  # two numbers to each peer
        least, most = (sum(bytes_) for bytes_ in zip(*moved, strict=True))
        assert least - counts <= most, case
        if case["none"] == 1:
            assert least == counts
        if max(case["rows"]) == 33 and size == 4:
            assert least < most
