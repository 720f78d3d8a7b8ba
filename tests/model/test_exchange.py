"""A layer whose experts and table rows are on other ranks: what one rank gives, in eager and within graphs."""

from typing import Any

import numpy as np
import pytest

from tests import ranks, small

CFG = small.config((small.FULL1,), candidates=False, engram=(0,), stages=0, n_routed_experts=8)
ROWS = (40, 3)  # of each rank


def logits(ep: Any, kernels: str) -> np.ndarray:
    runner = small.Runner(ranks.share(CFG, ep, kernels=kernels, dispatch="alltoall"), 16, 6)
    return rows(runner, ROWS[ep.rank])


def rows(runner: small.Runner, count: int) -> np.ndarray:
    return small.step(runner, small.Seq(small.tokens(count)).span(0, count))[0].numpy()


@pytest.mark.parametrize("kernels", ["reference", pytest.param("compile", marks=pytest.mark.slow)])
def test_ranks_of_different_sizes_give_what_one_gives(kernels):
    for count, got in zip(ROWS, ranks.run(2, logits, kernels), strict=True):
        want = rows(small.runner(CFG), count)
        assert np.abs(got - want).max() <= (0 if kernels == "reference" else 1e-5)
