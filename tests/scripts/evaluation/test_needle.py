"""Needles: where they stand, what is scored."""

import numpy as np
import pytest
import torch

from scripts.evaluation import needle
from tests.scripts.evaluation.conftest import TEXT, whole


def test_needles_stand_where_they_should(g):
    first, last, control = [p for p in needle.prompts(g, 120, 0) if p.task == "needle"]
    assert (first.depth, last.depth, control.depth) == (0.0, 1.0, None)
    assert len({len(p.sequence) for p in (first, last, control)}) == 1
    line = TEXT.decode(first.sequence[120:])
    assert line.startswith("\n    self.") and TEXT.decode(first.sequence[-first.scored :]) == line[-5:]
    assert TEXT.decode(first.sequence[1:]).startswith(line) and TEXT.decode(last.sequence).endswith(line * 2)
    assert TEXT.decode(control.sequence).count(line) == 1
    assert np.array_equal(needle.prompts(g, 120, 0)[0].sequence, first.sequence), "not a function of the seed"


def test_scores_are_those_of_the_whole(g):
    group = needle.prompts(g, 100, 1)[:3]
    for p, (nats, accuracy) in zip(group, needle.judge(g, group), strict=True):
        logits, target = whole(g.runner, p.sequence)[-p.scored :], torch.tensor(p.sequence[-p.scored :])
        assert nats == pytest.approx(float(torch.nn.functional.cross_entropy(logits, target)), rel=1e-5)
        assert accuracy == float((logits.argmax(-1) == target).float().mean())


def test_prompts_that_are_too_short_or_long(g):
    for length in (20, 5000):
        with pytest.raises(ValueError, match=f"needle.lengths: {length} tokens are too few .* or too many"):
            needle.prompts(g, length, 0)
