"""wandb for every script: what a run leaves in its folder is what is tracked, so that no script does anything for it.

The folder's ``result.json`` becomes the summary, each ``NAME.jsonl`` history ``NAME/key``, each ``NAME.csv`` a table,
each ``NAME.png`` an image; the resolved config and the git commit are the run's config. All of it is read when the run
ends, well or badly.
"""

import csv
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("offline", "online", "disabled")
START_S = 300  # wandb's own process may start late on a busy machine; by itself it gives up after 30 s
MAX_ROWS = 10_000  # of a table or a history; a longer history is thinned evenly, a longer table is cut
ROOT = Path(__file__).parents[1]
MODE = "WANDB_MODE"


@dataclass(frozen=True)
class Track:
    """conf/track, checked."""

    mode: str
    project: str
    tags: tuple[str, ...]

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"track.mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if not self.project:
            raise ValueError("track.project is empty: give the name of a wandb project, or track=none")

    @property
    def on(self) -> bool:
        return self.mode != "disabled" and os.environ.get(MODE) != "disabled"


@dataclass(frozen=True)
class Run:
    """Who runs: ``kind`` is the script (or ``sweep``), ``group`` the sweep that a job belongs to."""

    kind: str
    name: str
    group: str | None
    config: Mapping[str, Any]  # resolved


@contextmanager
def track(settings: Track, run: Run, folder: Path) -> Iterator[None]:
    """While open, a wandb run stands for the work inside; at the end it takes in what ``folder`` holds.

    An exception passes through and marks the run as failed. Raises ValueError if wandb refuses to start.
    """
    if not settings.on:
        yield
        return
    import wandb  # half a second: only where it is wanted

    quiet = {"console": "off", "silent": True, "disable_git": True, "save_code": False, "x_disable_stats": True}
    patient = {"init_timeout": START_S, "x_service_wait": START_S}
    try:
        opened = wandb.init(
            dir=folder.resolve(),  # wandb may write from a process of its own
            project=settings.project,
            tags=list(settings.tags),
            mode=None if MODE in os.environ else settings.mode,
            job_type=run.kind,
            name=run.name,
            group=run.group,
            config={**run.config, **commit()},
            settings=wandb.Settings(**quiet, **patient),
        )
    except wandb.Error as error:
        raise ValueError(f"track.mode={settings.mode}: {error}; track.mode=offline needs no account") from None
    with opened:
        try:
            yield
        finally:
            take_in(opened, folder)


def commit(root: Path = ROOT) -> dict[str, str | bool | None]:
    """The checked-out commit, and whether the tree differs from it; None for both outside a git checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": None if status is None else bool(status)}


def take_in(run: Any, folder: Path) -> None:
    """Hand wandb the results, histories, tables and plots in ``folder``."""
    import wandb

    for path in sorted(folder.glob("*.jsonl")):
        for row in history(path):
            run.log(row)
    shown: dict[str, Any] = {}
    for path in sorted(folder.glob("*.csv")):
        columns, rows = table(path)
        shown[path.stem] = wandb.Table(columns=columns, data=rows)
    for path in sorted(folder.glob("*.png")):
        shown[f"{path.stem}_plot"] = wandb.Image(str(path))
    if shown:
        run.log(shown)
    result = folder / "result.json"
    if result.is_file():
        run.summary.update(json.loads(result.read_text(encoding="utf-8")))


def history(path: Path) -> Iterator[dict[str, float]]:
    """The numbers of each line of a ``.jsonl`` file, keys led by its name; a last line cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for line in lines[:: -(-len(lines) // MAX_ROWS) or 1]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found = {f"{path.stem}/{k}": v for k, v in row.items() if type(v) in (int, float)}
        if found:
            yield found


def table(path: Path) -> tuple[list[str], list[list[float | str]]]:
    """Columns and rows of a ``.csv`` file; a column that is numbers throughout (or empty) is numbers."""
    with open(path, encoding="utf-8", newline="") as file:
        columns, *rows = csv.reader(file)
    rows = rows[:MAX_ROWS]
    numeric = [all(number(row[i]) is not None for row in rows if row[i]) for i in range(len(columns))]
    return columns, [[number(v) if n else v for v, n in zip(row, numeric, strict=True)] for row in rows]


def number(text: str) -> float | None:
    """``text`` as a number, None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None
