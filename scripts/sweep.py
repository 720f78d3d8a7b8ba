"""Sweeps (`-m`): each job notes how it ended, and when all are done the sweep folder gets one table and one plot.

    python -m scripts.evaluate -m eval=needle kernels=reference,compile

`summary.json` and `summary.csv` hold every result of every job, a failed one included; the printed table and
`summary.png` show the results that differ between jobs, or those that
`hydra.callbacks.summary.metrics=[bits_per_byte]` names. The last line of stdout is the path of `summary.json` with the
numbers of jobs. It works from the jobs' folders alone, so that a launcher may run them in other processes.
"""

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from scripts import report, tracking
from scripts.mapping import from_mapping
from scripts.tracking import Track

JOB = "job.json"  # in each job's folder
TABLE_METRICS, PLOT_METRICS = 6, 3  # most that are shown unless some are named


def attempt(work: Callable[[], dict | None]) -> None:
    """Do a job of a sweep and note how it ended; whatever it raises, the other jobs go on."""
    error = None
    try:
        bad = report.failures(work())
        error = ", ".join(f"{key}={value}" for key, value in bad.items()) or None
    except (ValueError, OSError) as raised:
        error = " ".join(str(raised).split())
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
    except SystemExit as raised:
        error = f"exit code {raised.code}" if raised.code else None
    about = HydraConfig.get()
    if error:
        print(f"error: job {about.job.num}: {error}", file=sys.stderr)
    noted = {"job": about.job.num, "overrides": overrides(about.overrides.task), "error": error}
    (report.run_folder() / JOB).write_text(json.dumps(noted) + "\n", encoding="utf-8")


def overrides(arguments: Sequence[str]) -> dict[str, str]:
    """Key and value of each override, as they were typed."""
    pairs = (a.lstrip("+~").partition("=") for a in arguments)
    return {key: value for key, _, value in pairs}


def rows(folder: Path) -> list[dict[str, Any]]:
    """A row for each job below ``folder``: job, status, error, what varies between jobs, then its results."""
    noted = [json.loads(p.read_text(encoding="utf-8")) | {"in": p.parent} for p in folder.rglob(JOB)]
    jobs = sorted(noted, key=lambda j: j["job"])
    keys = list(dict.fromkeys(k for j in jobs for k in j["overrides"]))
    swept = [k for k in keys if len({j["overrides"].get(k) for j in jobs}) > 1] or keys
    out = []
    for j in jobs:
        path = j["in"] / "result.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        values = {k: value(j["overrides"].get(k)) for k in swept}
        status = "failed" if j["error"] else "done"
        out.append({"job": j["job"], "swept": values, "status": status, "error": j["error"], "result": result})
    return out


def value(text: str | None) -> float | int | str | None:
    """What was typed, as a number where it is one."""
    number = None if text is None else tracking.number(text)
    if number is None:
        return text
    return int(number) if number.is_integer() and text.lstrip("-").isdigit() else number


def metrics(jobs: Sequence[dict[str, Any]]) -> list[str]:
    """Numeric results, those that differ between jobs alone if there are such, in the order of the scripts."""
    swept = {k for j in jobs for k in j["swept"]}
    keys = dict.fromkeys(k for j in jobs for k, v in j["result"].items() if type(v) in (int, float) and k not in swept)
    differing = [k for k in keys if len({j["result"].get(k) for j in jobs}) > 1]
    return differing or list(keys)


def series(jobs: Sequence[dict[str, Any]]) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """The swept key with most values, which is the plot's x, and the jobs by what the other keys say."""
    keys = list(jobs[0]["swept"])
    x = max(keys, key=lambda k: len({j["swept"][k] for j in jobs})) if keys else ""
    lines: dict[str, list[dict[str, Any]]] = {}
    for j in jobs:
        label = " ".join(f"{k}={v}" for k, v in j["swept"].items() if k != x)
        lines.setdefault(label, []).append(j)
    return x, lines


def draw(folder: Path, jobs: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """summary.png: each metric over the swept key, a line for each setting of the others."""
    done = [j for j in jobs if j["status"] == "done"]
    if not done or not names:
        return
    x, lines = series(done)
    with report.plot("summary", len(names), folder) as axes:
        for ax, name in zip(axes, names, strict=True):
            for label, own in lines.items():
                points = [(j["swept"].get(x, j["job"]), j["result"][name]) for j in own if name in j["result"]]
                numeric = all(isinstance(a, (int, float)) for a, _ in points)
                points = sorted(points) if numeric else [(str(a), b) for a, b in points]
                ax.plot(*zip(*points, strict=True), marker="o", label=label) if points else None
            ax.set(xlabel=x or "job", ylabel=name)
            if len(lines) > 1:
                ax.legend()


def summarise(folder: Path, chosen: Sequence[str] | None = None) -> dict[str, Any]:
    """Write summary.json, summary.csv and summary.png into the sweep's folder, print the table; returns the last line.

    Raises ValueError, after writing, for a chosen metric that no job has.
    """
    jobs = rows(folder)
    known = list(dict.fromkeys(k for j in jobs for k in j["result"]))
    swept = list(jobs[0]["swept"]) if jobs else []
    rest = [k for k in known if k not in swept]
    out = {"summary": str(folder / "summary.json"), "jobs": len(jobs)}
    out |= {"failed": sum(j["status"] == "failed" for j in jobs)}
    (folder / "summary.json").write_text(json.dumps({**out, "swept": swept, "rows": jobs}, indent=1) + "\n")
    head = ["job", *swept, "status"]
    cells = lambda j, names: [j["job"], *j["swept"].values(), j["status"], *(j["result"].get(n) for n in names)]  # noqa: E731
    report.write_csv(folder / "summary.csv", [*head, *rest, "error"], [[*cells(j, rest), j["error"]] for j in jobs])
    for name in chosen or ():
        if name not in known:
            raise ValueError(f"hydra.callbacks.summary.metrics: no job has {name!r}; results: {', '.join(known)}")
    names = list(chosen) if chosen else metrics(jobs)[:TABLE_METRICS]
    report.print_table([*head, *names], [cells(j, names) for j in jobs])
    draw(folder, jobs, names[:PLOT_METRICS])
    return out


class Summary(Callback):
    """Hydra's hook for the end of a sweep. Ends the program with code 1 if a job failed."""

    def __init__(self, metrics: Sequence[str] | None = None):
        self.metrics = metrics

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        own = OmegaConf.masked_copy(config, [k for k in config if k != "hydra"])
        values = OmegaConf.to_container(own, resolve=True)
        run = tracking.Run("sweep", name(config.hydra), name(config.hydra), values)
        try:
            with tracking.track(from_mapping(Track, values["track"], "track."), run, folder):
                out = summarise(folder, self.metrics)
        except Exception as error:  # Hydra would turn it into a warning that nobody sees
            traceback.print_exc()
            raise SystemExit(1) from error
        print(json.dumps(out), flush=True)
        if out["failed"]:
            raise SystemExit(1)


def name(hydra: DictConfig) -> str:
    """What a sweep is called: script, and the day and time of its folder."""
    return "/".join([hydra.job.name, *Path(hydra.sweep.dir).parts[-2:]])
