"""The report card from records made by hand, its percentiles against numpy's."""

import numpy as np
import pytest

from serve.load.card import Context, card, flight, gaps
from serve.load.client import StepSeen, Usage
from serve.load.drive import Record


def record(sent, arrivals, prompt=100, cached=0, reachable=0, replayed=0, finish="length", warmup=False):
    out = sum(n for _, n in arrivals)
    end = arrivals[-1][0] if arrivals else sent + 1
    usage = Usage(finish, prompt, out, cached, replayed) if finish else None
    return Record(0, 0, "s", 0, warmup, sent, prompt, out, reachable, list(arrivals), end if finish else None, usage)


TWO = [
    record(0.0, [(1.0, 1), (1.2, 2), (1.5, 1)], 100, 64, 80, 10),
    record(1.0, [(3.0, 1), (4.0, 1)], 50, 0, 0),
]


def test_totals_and_rates():
    out = card(TWO, Context(gpus=2, price_per_hour=3.6))
    assert (out["requests"], out["completed"], out["prompt_tokens"], out["output_tokens"]) == (2, 2, 150, 6)
    assert out["duration_s"] == 4.0
    assert out["total_tok_per_s"] == pytest.approx(156 / 4 / 2)
    assert out["uncached_tok_per_s"] == pytest.approx((150 - 64) / 4 / 2)
    assert out["output_tok_per_s"] == pytest.approx(6 / 4 / 2)
    assert out["requests_per_s"] == pytest.approx(0.5)
    # 3.6 an hour and GPU are 0.001 a second: 156 tokens took 4 seconds of 2 GPUs
    assert out["cost_per_m_total"] == pytest.approx(0.008 / 156 * 1e6)
    assert out["cost_per_m_output"] == pytest.approx(0.008 / 6 * 1e6)
    assert card(TWO, Context())["cost_per_m_total"] is None


def test_cache():
    out = card(TWO, Context())
    assert out["hit_theoretical"] == pytest.approx(80 / 150)
    assert out["hit_achieved"] == pytest.approx(64 / 150)
    assert out["replayed_tokens"] == 10 and out["replayed_share"] == pytest.approx(10 / 150)


def test_latencies_by_hand():
    out = card(TWO, Context())
    assert out["ttft_ms_p50"] == pytest.approx(1500)
    assert out["tpot_ms_mean"] == pytest.approx((0.5 / 3 + 1.0) / 2 * 1e3)
    assert np.allclose(np.sort(gaps(TWO)), [0.1, 0.1, 0.3, 1.0])
    assert out["itl_ms_p50"] == pytest.approx(200) and out["interactivity_p50"] == pytest.approx(5.0)
    assert out["e2e_ms_mean"] == pytest.approx((1.5 + 3.0) / 2 * 1e3)
    assert out["acceptance_length"] == pytest.approx((2 + 1 + 1) / 3)


def test_percentiles_against_numpy():
    rng = np.random.default_rng(0)
    made = []
    for sent in np.cumsum(rng.exponential(1.0, 50)).tolist():
        times = sent + np.cumsum(rng.exponential(0.2, rng.integers(1, 40)))
        made.append(record(sent, [(t, int(rng.integers(1, 4))) for t in times.tolist()]))
    out = card(made, Context())
    first = [r.arrivals[0][0] - r.sent_s for r in made]
    steps = [(b[0] - a[0]) / b[1] for r in made for a, b in zip(r.arrivals, r.arrivals[1:]) for _ in range(b[1])]
    for p in (50, 90, 99):
        assert out[f"ttft_ms_p{p}"] == pytest.approx(np.percentile(first, p) * 1e3)
        assert out[f"itl_ms_p{p}"] == pytest.approx(np.percentile(steps, p) * 1e3)
        assert out[f"interactivity_p{p}"] == pytest.approx(1 / np.percentile(steps, p))


def test_in_flight():
    times, level = flight(TWO)
    assert times.tolist() == [0.0, 1.0, 1.5, 4.0] and level.tolist() == [1, 2, 1, 0]
    out = card(TWO, Context())
    assert out["in_flight_max"] == 2 and out["in_flight_mean"] == pytest.approx((1 + 1 + 2.5) / 4)


def test_warm_up_does_not_count():
    out = card([record(0.0, [(9.0, 1)], 1000, 1000, warmup=True), *TWO], Context())
    assert out == card(TWO, Context())


def test_no_requests():
    out = card([], Context())
    assert out["requests"] == 0 and out["total_tok_per_s"] is None and out["ttft_ms_p50"] is None
    assert not out["submission_valid"]


def test_failed_and_cut():
    lost = [record(0.0, [], finish="error"), record(0.0, [], finish="")]
    lost[1].usage = None
    out = card([*TWO, *lost], Context())
    assert (out["requests"], out["completed"], out["failed_requests"], out["cut_requests"]) == (4, 2, 1, 1)
    assert out["prompt_tokens"] == 150 and not out["valid_failed"] and out["valid_coverage"]


def test_validity():
    many = [record(float(i), [(i + 1.0, 1), (i + 2.0, 1)]) for i in range(950)]
    assert card(many, Context())["submission_valid"]
    assert not card(many, Context(left_out=20, known=1000))["valid_overflow"]
    assert card(many, Context(left_out=10, known=1000))["submission_valid"]
    assert card(many[:100], Context())["valid_duration"] is False
    bad = [record(float(i), [], finish="error") for i in range(106)]
    assert not card([*many, *bad], Context())["valid_failed"]
    assert card([*many, *bad[:90]], Context())["valid_failed"]


def test_what_the_engine_tells():
    stats = [{"steps_total": n, "host_seconds_total": 0.1 * n, "device_seconds_total": 2.0 * n} for n in (4, 9, 14)]
    steps = [StepSeen(float(i), 2, 3, told) for i, told in enumerate(stats)]
    out = card(TWO, Context(kv_bytes_per_token=890, skipped_s={"system": 5.0}, steps=steps))
    assert (out["steps"], out["kv_bytes_per_token"]) == (10, 890)
    assert out["step_host_ms"] == pytest.approx(100) and out["step_device_ms"] == pytest.approx(2000)
    assert (out["idle_capped_system_s"], out["idle_capped_tree_s"]) == (5.0, 0.0)


def test_stretches_of_unknown_length_count_alike():
    r = record(0.0, [(1.0, 1), (2.0, 1), (4.0, 1)])
    r.usage = Usage("length", 100, 5)  # four tokens in two stretches
    assert gaps([r]).tolist() == [0.5, 0.5, 1.0, 1.0]
    assert card([r], Context())["acceptance_length"] == pytest.approx(2.0)
