"""bench=eplb in small: streams are as uneven as asked for, traces are read, figures are those of later intervals."""

import numpy as np
import pytest

from parallel.eplb import metric
from parallel.eplb.policy import Slots
from scripts.benches import eplb, streams
from scripts.benches.sizes import EplbSizes
from scripts.benches.streams import Size
from scripts.evaluation import trace
from scripts.evaluation.trace import Routing, Trace

SIZE = Size(4, 64, 8, 50_000)


@pytest.mark.parametrize("name", streams.STREAMS)
def test_streams_have_the_balance_asked_for_and_plans_gain(name):
    choices = streams.make(name, SIZE, 8, 0.4)
    assert choices.shape == (8, 4, 64) and (choices.sum(-1) == SIZE.choices).all()
    judged = eplb.judge(choices, Slots(64, 8, 16))
    if name == "even":
        assert judged.before > 0.95 and judged.after > judged.before - 0.02
    else:
        whole = metric.balancedness(metric.rank_loads(choices.sum(0), 8))
        assert whole == pytest.approx(0.4, abs=0.03)
        assert judged.after > judged.before + 0.25 and judged.followed > 0.75


def test_a_trace_is_cut_into_intervals(tmp_path):
    rng = np.random.default_rng(0)
    p = 1 / np.arange(1, 17)
    ids = np.stack([[rng.choice(16, 2, False, p / p.sum()) for _ in range(3)] for _ in range(800)]).astype(np.int16)
    part = Trace(ids, np.arange(0, 801, 10), np.zeros(800, np.int32), np.arange(800, dtype=np.int32), 16)
    trace.save(tmp_path / "routing.npz", Routing(np.array([800]), part))
    parts = eplb.traced(tmp_path / "routing.npz", EplbSizes(None, 4, (4, 16)), lambda n: None)
    judged, redundant = parts["target"]["trace, 4"]
    assert set(parts) == {"target"} and redundant == 4
    assert judged.before < 0.75 and judged.after > 0.8, "100 choices a layer and interval"
    assert parts["target"]["trace, 16"][0].after > 0.8


def test_a_trace_too_short_to_judge_is_refused(tmp_path):
    part = Trace(np.zeros((0, 2, 1), np.int16), np.zeros(10, np.int64), *np.zeros((2, 0), np.int32), 4)
    trace.save(tmp_path / "routing.npz", Routing(np.array([1]), part))
    with pytest.raises(ValueError, match="target has 9 steps of 0 tokens; 4 are needed"):
        eplb.traced(tmp_path / "routing.npz", EplbSizes(None, 4, (4,)), lambda n: None)
