"""What a run leaves in Hydra's run folder: result.json, tables as CSV, plots as PNG; and notes on stderr."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.table import Column, Table

FAILURES = ("failed", "mismatches")  # results that are counts of what must not be
WIDTH = 120  # columns of a printed table where stdout is no terminal


def run_folder() -> Path:
    """Hydra's folder of this run (or of this job of a sweep)."""
    return Path(HydraConfig.get().runtime.output_dir)


def note_capped(prompt_tokens: Sequence[int], max_tokens: int, context: int) -> None:
    """Say on stderr to what ``max_tokens`` comes down where prompts leave less room in the context."""
    rooms = [context - n for n in prompt_tokens if context - n < max_tokens]
    if rooms:
        to = str(min(rooms)) if min(rooms) == max(rooms) else f"{min(rooms)} to {max(rooms)}"
        which = f" for {len(rooms)} of {len(prompt_tokens)} prompts" if len(prompt_tokens) > 1 else ""
        print(f"note: max_tokens={max_tokens} is capped to {to}{which} by the context of {context}", file=sys.stderr)


def emit(result: dict[str, Any]) -> None:
    """Print ``result`` as one JSON line and write it as result.json. Values are plain; keys keep their order.

    Nothing may be printed to stdout after this. Raises ValueError for NaN or infinity, which JSON has no word for.
    """
    for key, value in result.items():
        assert isinstance(value, (str, int, float, bool, type(None))), f"result {key!r} is a {type(value).__name__}"
    line = json.dumps(result, allow_nan=False)
    (run_folder() / "result.json").write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)


def failures(result: dict[str, Any] | None) -> dict[str, Any]:
    """The results that count what must not be, where they are not zero."""
    return {key: result[key] for key in FAILURES if result.get(key)} if result else {}


def table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, and write it as NAME.csv into the run folder, there with every digit."""
    print_table(columns, rows)
    write_csv(run_folder() / f"{name}.csv", columns, rows)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stdout. A value of None is a dash."""
    printed = Table(*(Column(c, overflow="fold") for c in columns))
    for row in rows:
        printed.add_row(*map(shown, row))
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(printed)


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A value of None is an empty cell."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def shown(value: Any) -> str:
    """A cell as it is printed: four significant digits of a fraction, thousands marked."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


@contextmanager
def plot(name: str, panels: int = 1, folder: Path | None = None) -> Iterator[list[Any]]:
    """The axes of ``panels`` plots side by side, which are saved as NAME.png in the run folder when left."""
    from matplotlib.figure import Figure  # takes a second: only where something is drawn

    figure = Figure(figsize=(5.5 * panels, 4), layout="constrained")
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    yield axes
    figure.savefig((folder or run_folder()) / f"{name}.png", dpi=110)
