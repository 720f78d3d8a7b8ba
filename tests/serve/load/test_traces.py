"""Trace readers: the figures published beside the real slices, and each kind of bad row by file, line and field."""

import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from serve.load.records import Turn, expand, hits, runs_of, subagents, turns
from serve.load.traces import read_azure, read_mooncake, read_prompts, read_tracelab, read_weka

TRACES = Path(__file__).parents[4] / "shared" / "traces"  # beside the repository, not in it
real = pytest.mark.skipif(not TRACES.is_dir(), reason="the trace slices are not beside the repository")


def test_runs_and_ids():
    ids = np.array([4, 5, 6, 2, 9, 10])
    assert runs_of(ids).tolist() == [[4, 3], [2, 1], [9, 2]]
    assert expand(runs_of(ids)).tolist() == ids.tolist()
    assert len(expand(runs_of([]))) == 0


@pytest.fixture(scope="module")
def sessions():
    return read_weka(TRACES / "agentic_weka" / "agentic_weka_dev.jsonl")


@real
def test_golden_hits_of_every_session(sessions):
    with open(TRACES / "agentic_weka" / "agentic_weka_dev_summary.csv") as stream:
        golden = list(csv.DictReader(stream))
    assert len(golden) == len(sessions) == 300
    for row, s in zip(golden, sessions):
        every = list(turns(s.events))
        top = [e for e in s.events if isinstance(e, Turn)]
        found, total = hits(every)
        mine = {
            "id": s.name,
            "n_requests_top": len(top),
            "n_subagents": len(list(subagents(s.events))),
            "n_requests_all": len(every),
            "in_tokens": sum(t.input_tokens for t in every),
            "out_tokens": sum(t.output_tokens for t in every),
            "max_in": max(t.input_tokens for t in every),
            "first_in": top[0].input_tokens,
            "last_in": top[-1].input_tokens,
            "duration_s": s.duration_s,
            "blocks_hit": found,
            "blocks_total": total,
            "unique_blocks": int(np.bincount(np.concatenate([t.ids for t in every])).astype(bool).sum()),
        }
        assert {k: type(v)(row[k]) for k, v in mine.items()} == mine
        assert f"{found / total:.6f}" == f"{float(row['theoretical_block_hit_rate']):.6f}"


@real
def test_source_files_say_what_the_slice_says(sessions):
    by_name = {s.name: s for s in sessions}
    raw = read_weka(TRACES / "agentic_weka" / "raw")
    assert [len(list(turns(s.events))) for s in raw] == [3, 4, 32]
    assert len(list(subagents(raw[2].events))) == 2
    for s in raw:
        if s.name in by_name:
            both = zip(turns(s.events), turns(by_name[s.name].events), strict=True)
            assert all(a.ids.tolist() == b.ids.tolist() and a.think_s == b.think_s for a, b in both)


@real
@pytest.mark.parametrize(
    ("name", "count", "span_s", "golden"),
    [
        ("conversation_trace.rows_1_8000", 8000, 2435.999, (69263, 197462)),
        ("synthetic_trace.rows_1_2600", 2600, 681.048, (29352, 68592)),
    ],
)
def test_golden_hits_of_mooncake(name, count, span_s, golden):
    rows = read_mooncake(TRACES / "mooncake" / f"{name}.jsonl")
    assert (len(rows), rows[-1].at_s, hits(rows)) == (count, span_s, golden)


@real
@pytest.mark.parametrize(
    ("name", "count", "p50"), [("code.rows_1_5300", 5300, 1468), ("conv.rows_1_11600", 11600, 1027)]
)
def test_azure_slices(name, count, p50):
    rows = read_azure(TRACES / "azure2023" / f"AzureLLMInferenceTrace_{name}.csv")
    assert len(rows) == count
    assert int(np.median([r.input_tokens for r in rows])) == p50
    assert rows[0].at_s == 0 and all(a.at_s <= b.at_s for a, b in pairwise(rows))


@real
def test_tracelab_example():
    rows = read_tracelab(TRACES / "tracelab_example" / "round_trace.jsonl")
    assert rows[0].at_s == 0 and 32272 in [r.input_tokens for r in rows]


# --- bad rows ---

TURN = {"t": 0, "type": "n", "in": 130, "out": 5, "hash_runs": [[1, 2]]}
AGENT = {"t": 3, "type": "subagent", "agent_id": "a", "status": "completed", "requests": [TURN]}


def weka(*requests, **changes):
    return json.dumps({"id": "s", "block_size": 64, "requests": list(requests)} | changes)


BAD_WEKA = [
    ("[1]", "line 1: the row is no object but [1]"),
    ("{", "line 1: no JSON"),
    ("", "holds no rows"),
    (weka(TURN, block_size=0), "line 1: block_size must be an integer >= 1, got 0"),
    (weka(TURN, id=3), "line 1: id must be text, got 3"),
    (weka(TURN, hash_id_scope="global"), "hash_id_scope must be one of local, got 'global'"),
    (weka(), "requests must be a list with at least one request"),
    (weka(TURN | {"in": "x"}), "requests[0].in must be an integer >= 1, got 'x'"),
    (weka(TURN, TURN | {"t": -1}), "requests[1].t must be a number >= 0, got -1"),
    (weka(TURN | {"think_time": "1"}), "requests[0].think_time must be a number >= 0, got '1'"),
    (weka(TURN | {"type": "z"}), "requests[0].type must be one of s, n, subagent, got 'z'"),
    (weka(TURN | {"hash_runs": [[1, 3]]}), "requests[0].hash_runs must be 2 blocks"),
    (weka(TURN | {"hash_runs": [[1]]}), "requests[0].hash_runs must be a list of [start, length]"),
    (weka(TURN | {"hash_runs": [[1, 2], [3]]}), "requests[0].hash_runs must be a list of [start, length]"),
    (weka(TURN | {"hash_runs": [[-1, 2]]}), "requests[0].hash_runs must be ids >= 0"),
    (
        weka({k: v for k, v in TURN.items() if k != "hash_runs"}),
        "requests[0].hash_ids must be a list of integers, got noth",
    ),
    (weka(TURN, AGENT | {"status": "lost"}), "requests[1].status must be one of completed, async_launched"),
    (weka(TURN, AGENT | {"requests": [TURN | {"out": -1}]}), "requests[1].requests[0].out must be an integer >= 0"),
]


@pytest.mark.parametrize(("text", "message"), BAD_WEKA, ids=[m for _, m in BAD_WEKA])
def test_bad_weka_rows(text, message, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_weka(file)
    assert str(file) in str(caught.value) and message in str(caught.value)


def test_an_error_names_its_line(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(weka(TURN) + "\n\n" + weka(TURN | {"in": 0}) + "\n")
    with pytest.raises(ValueError, match=r"x.jsonl, line 3: requests\[0\].in"):
        read_weka(file)
    assert len(read_weka(file, limit=1)) == 1


def test_missing_files(tmp_path):
    for read in (read_weka, read_mooncake, read_azure, read_prompts, read_tracelab):
        with pytest.raises(ValueError, match="nowhere: no such file"):
            read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no \.json or \.jsonl file"):
        read_weka(tmp_path)


MOON = {"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [7, 9]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([MOON, MOON | {"timestamp": 999}], "line 2: timestamp must be no earlier than the row before, got 999"),
        ([MOON | {"hash_ids": [1]}], "hash_ids must be 2 ids, one for each block of 512 tokens, got [1]"),
        ([MOON | {"hash_ids": [1, 2.5]}], "hash_ids must be a list of integers"),
        ([MOON | {"output_length": None}], "output_length must be an integer >= 0, got None"),
    ],
)
def test_bad_mooncake_rows(rows, message, tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(ValueError) as caught:
        read_mooncake(file)
    assert message in str(caught.value)


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:17:03.9799600,4808,10\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c\n", "line 1: the header must be TIMESTAMP"),
        (HEAD, "holds no rows"),
        (HEAD + "2023-11-16 18:17:03.97,x,10\n", "line 2: ContextTokens must be an integer >= 1, got 'x'"),
        (HEAD + GOOD + "2023-11-16 18:17:03,1,10\n", "line 3: TIMESTAMP must be no earlier"),
        (HEAD + "noon,1,10\n", "line 2: TIMESTAMP must be a time such as"),
        (HEAD + "2023-11-16 18:17:03,1\n", "line 2: 2 fields, not 3"),
    ],
)
def test_bad_azure_rows(text, message, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_azure(file)
    assert message in str(caught.value)


def test_azure_times(tmp_path):
    (tmp_path / "a.csv").write_text(HEAD + GOOD + "2023-11-16 18:17:05.0000000,7,0\r\n")
    rows = read_azure(tmp_path / "a.csv")
    assert [(round(r.at_s, 7), r.input_tokens, r.output_tokens) for r in rows] == [(0, 4808, 10), (1.02004, 7, 0)]


@pytest.mark.parametrize(
    ("raw", "message"), [(b"", "no prompts"), (b"a\n\n", "line 2: the prompt"), (b"\xff", "line 1: not")]
)
def test_bad_prompt_files(raw, message, tmp_path):
    (tmp_path / "p").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "p")
