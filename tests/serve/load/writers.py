"""Traces in the formats that serve/load/traces.py reads, from what serve/load/synthetic.py makes."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from serve.load.records import Arrival, Session, Subagent, Turn


def write_weka(path: Path, made: Sequence[Session], runs: bool = True) -> None:
    """A session a line, blocks as ``hash_runs`` or, as in the source files, as ``hash_ids``."""
    rows = [
        {"id": s.name, "block_size": s.block_size, "hash_id_scope": "local", "tool_tokens": s.head_tokens,
         "system_tokens": 0, "requests": [weka_event(e, runs) for e in s.events]}
        for s in made
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def weka_event(event: Turn | Subagent, runs: bool) -> dict:
    if isinstance(event, Subagent):
        status = "async_launched" if event.background else "completed"
        inner = [weka_event(e, runs) for e in event.events]
        return {"t": event.start_s, "type": "subagent", "agent_id": event.name, "status": status,
                "tool_tokens": event.head_tokens, "system_tokens": 0, "requests": inner}  # fmt: skip
    blocks = {"hash_runs": event.runs.tolist()} if runs else {"hash_ids": event.ids.tolist()}
    row = {"t": event.start_s, "type": "s", "in": event.input_tokens, "out": event.output_tokens, **blocks}
    return row | {k: v for k, v in (("api_time", event.call_s), ("think_time", event.think_s)) if v is not None}


def write_mooncake(path: Path, made: Sequence[Arrival]) -> None:
    rows = [
        {"timestamp": round(a.at_s * 1000), "input_length": a.input_tokens, "output_length": a.output_tokens,
         "hash_ids": np.concatenate([np.arange(s, s + n) for s, n in a.runs.tolist()]).tolist()}
        for a in made
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_azure(path: Path, made: Sequence[Arrival]) -> None:
    begin = datetime(2023, 11, 16)
    rows = [
        f"{begin + timedelta(seconds=a.at_s):%Y-%m-%d %H:%M:%S.%f}0,{a.input_tokens},{a.output_tokens}\n" for a in made
    ]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
