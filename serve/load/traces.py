"""Readers of traces: AgentX sessions in the Weka format, Mooncake, Azure, TraceLab rounds, files of prompts.

Each checks every row (ValueError with file, line, field) and gives plain records. Formats as their sources have them:
kv-cache-tester ``traces/``, Mooncake ``FAST25-release``, AzurePublicDataset 2023, TraceLab ``sanitized``.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from serve.load.fields import Row, json_rows, lines, parsed
from serve.load.records import Arrival, Session, Subagent, Turn, runs_of

MOONCAKE_BLOCK = 512
AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
STATUSES = ("completed", "async_launched")


# --- Weka: sessions ---


def read_weka(path: str | Path, limit: int | None = None) -> list[Session]:
    """Sessions of a .jsonl file (one a line), a source .json file (one), or a folder of such files, in name order.

    A request's blocks are ``hash_ids``, or ``hash_runs`` as [start, length] pairs; ``t`` inside a subagent counts from
    its marker.
    """
    out = []
    for file in weka_files(Path(path)):
        for row in weka_rows(file):
            if limit is not None and len(out) >= limit:
                return out
            out.append(session(row))
    return out


def weka_files(path: Path) -> Sequence[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(f for f in path.iterdir() if f.suffix in (".json", ".jsonl"))
    if not found:
        raise ValueError(f"{path}: no .json or .jsonl file in this folder")
    return found


def weka_rows(file: Path) -> Iterator[Row]:
    if file.suffix == ".json":
        yield Row(str(file), 1, parsed("\n".join(text for _, text in lines(file)), file, 1))
    else:
        yield from json_rows(file)


def session(row: Row) -> Session:
    if "hash_id_scope" in row.values:
        row.text("hash_id_scope", ("local",))
    block = row.count("block_size", 1)
    events = tuple(event(r, block) for r in row.rows("requests"))
    if not any(isinstance(e, Turn) for e in events):
        row.fail("requests", "a list with at least one request")
    return Session(row.text("id"), block, head(row), events)


def head(row: Row) -> int:
    return sum(row.count(name) for name in ("tool_tokens", "system_tokens") if row.values.get(name) is not None)


def event(row: Row, block: int) -> Turn | Subagent:
    if row.text("type", ("s", "n", "subagent")) != "subagent":
        return turn(row, block)
    inner = tuple(event(r, block) for r in row.rows("requests"))
    background = row.text("status", STATUSES) == "async_launched"
    return Subagent(row.seconds("t"), row.text("agent_id"), background, head(row), inner)


def turn(row: Row, block: int) -> Turn:
    tokens, made = row.count("in", 1), row.count("out")
    return Turn(
        start_s=row.seconds("t"),
        input_tokens=tokens,
        output_tokens=made,
        runs=blocks(row, tokens // block),
        call_s=row.seconds("api_time", optional=True),
        think_s=row.seconds("think_time", optional=True),
    )


def blocks(row: Row, need: int) -> np.ndarray:
    """The request's block ids as runs; there must be one for each full block of the prompt."""
    if "hash_runs" in row.values:
        field, runs = "hash_runs", integers(row, "hash_runs", 2)
    else:
        field, runs = "hash_ids", runs_of(integers(row, "hash_ids", 1))
    if len(runs) and (runs[:, 0].min() < 0 or runs[:, 1].min() < 1):
        row.fail(field, "ids >= 0 in runs of at least one")
    if runs[:, 1].sum() != need:
        row.fail(field, f"{need} blocks, one for each full block of the prompt")
    return runs


def integers(row: Row, field: str, dims: int) -> np.ndarray:
    """A list of integers, or of pairs of them."""
    value = row.values.get(field)
    shape = (0, 2)[:dims] if value == [] else None
    try:
        out = np.zeros(shape, np.int64) if shape else np.array(value)
    except ValueError:
        out = np.zeros(())
    if not isinstance(value, list) or out.dtype != np.int64 or out.ndim != dims or (dims == 2 and out.shape[1] != 2):
        row.fail(field, "a list of integers" if dims == 1 else "a list of [start, length]")
    return out


# --- flat traces ---


def read_mooncake(path: str | Path, limit: int | None = None) -> list[Arrival]:
    """Requests with ids of 512-token blocks, global to the file; the last block may be partial."""
    out = []
    for row in json_rows(Path(path)):
        if limit is not None and len(out) >= limit:
            break
        tokens, ids = row.count("input_length", 1), integers(row, "hash_ids", 1)
        if len(ids) != -(-tokens // MOONCAKE_BLOCK):
            row.fail("hash_ids", f"{-(-tokens // MOONCAKE_BLOCK)} ids, one for each block of {MOONCAKE_BLOCK} tokens")
        if len(ids) and ids.min() < 0:
            row.fail("hash_ids", "ids >= 0")
        at = row.seconds("timestamp") / 1000
        if out and at < out[-1].at_s:
            row.fail("timestamp", "no earlier than the row before")
        out.append(Arrival(at, tokens, row.count("output_length"), runs_of(ids), MOONCAKE_BLOCK))
    return out


def read_azure(path: str | Path, limit: int | None = None) -> list[Arrival]:
    """Requests of a CSV with their two lengths; times count from the first row."""
    path, out, first = Path(path), [], None
    for number, line in lines(path):
        cells = line.removeprefix("\ufeff").split(",")
        if number == 1:
            if tuple(cells) != AZURE_HEADER:
                raise ValueError(f"{path}, line 1: the header must be {','.join(AZURE_HEADER)}, got {line!r}")
            continue
        if not line or (limit is not None and len(out) >= limit):
            break
        if len(cells) != 3:
            raise ValueError(f"{path}, line {number}: {len(cells)} fields, not 3")
        row = Row(str(path), number, dict(zip(AZURE_HEADER, cells)))
        at = stamp(row)
        first = at if first is None else first
        if at < first + (out[-1].at_s if out else 0) - 1e-6:
            row.fail("TIMESTAMP", "no earlier than the row before")
        out.append(Arrival(at - first, digits(row, "ContextTokens", 1), digits(row, "GeneratedTokens", 0)))
    if not out:
        raise ValueError(f"{path} holds no rows")
    return out


def stamp(row: Row) -> float:
    """Seconds of ``2023-11-16 18:17:03.9799600``: seven decimals, which datetime does not take."""
    text, _, fraction = row.text("TIMESTAMP").partition(".")
    try:
        whole = datetime.strptime(text, "%Y-%m-%d %H:%M:%S")
        return (whole - datetime(2000, 1, 1)).total_seconds() + int(fraction or 0) / 10 ** len(fraction)
    except ValueError:
        row.fail("TIMESTAMP", "a time such as 2023-11-16 18:17:03.9799600")


def digits(row: Row, field: str, low: int) -> int:
    text = row.text(field)
    if not text.isdecimal() or int(text) < low:
        row.fail(field, f"an integer >= {low}")
    return int(text)


def read_tracelab(path: str | Path, limit: int | None = None) -> list[Arrival]:
    """Rounds of coding agents with their lengths; a round starts with its first timing event, times count from the
    file's earliest. What a round shares with others is known as a length only, so there are no blocks."""
    found = []
    for row in json_rows(Path(path)):
        if limit is not None and len(found) >= limit:
            break
        events = row.rows("timing_events")
        if not events:
            row.fail("timing_events", "a list with at least one event")
        try:
            at = datetime.fromisoformat(events[0].text("timestamp")).timestamp()
        except ValueError:
            events[0].fail("timestamp", "an ISO time")
        found.append((at, row.count("input_tokens_total", 1), row.count("output_tokens")))
    begin = min(at for at, _, _ in found)
    return [Arrival(at - begin, tokens, made) for at, tokens, made in sorted(found)]


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """A prompt a line. Raises ValueError for an empty line."""
    out = []
    for number, line in lines(Path(path)):
        if limit is not None and len(out) >= limit:
            break
        if not line:
            raise ValueError(f"{path}, line {number}: the prompt is empty")
        out.append(line)
    if not out:
        raise ValueError(f"{path} holds no prompts")
    return out
