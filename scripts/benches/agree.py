"""Step agreement: gloo against recursive doubling over shared memory, by ranks, pinned; and a rank that dies is named.

Transport is from the last rank's arrival to the return; what a rank waits for a late one is skew, shown beside it: a
faster transport does not shorten it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts import report
from scripts.build import ROOT, Settings
from scripts.progress import progress


def measure(ranks: int, seconds: float) -> dict:
    """One line of `scripts.benches.ranks`, in an interpreter of its own. Raises ValueError with its words if it
    fails."""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.benches.ranks", str(ranks), str(seconds), str(Path(folder) / "store")]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"bench=agree: {ranks} ranks failed: {done.stderr.strip()[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(s: Settings) -> dict:
    """Table by ranks; keys ``ratio_n{N}``, ``recursive_us_n{N}``, ``gloo_us_n{N}``, ``rounds_n{N}``, skews,
    ``named``."""
    out: dict = {}
    rows, faults, sizes = [], [], s.benches.agree
    with progress("bench=agree", len(sizes.ranks), "sizes") as advance:
        for n in sizes.ranks:
            got = measure(n, sizes.seconds)
            if not got["equal"]:
                raise ValueError(f"bench=agree: rows differ between {n} ranks; no figures")
            ratio = got["gloo_us"] / got["recursive_us"]
            times = [got[f"{name}_us"] for name in ("gloo", "recursive", "gloo_skew", "recursive_skew")]
            rows.append([n, got["rounds"], *times, ratio, got["gloo_steps"], got["recursive_steps"]])
            faults.append([n, f"rank {n - 1} is killed", "by all" if got["named"] else "no", got["named_s"]])
            figures = {"ratio": ratio, **{key: got[key] for key in ("recursive_us", "gloo_us", "rounds")}}
            figures |= {"recursive_skew_us": got["recursive_skew_us"], "gloo_skew_us": got["gloo_skew_us"]}
            out |= {f"{key}_n{n}": round(value, 2) for key, value in figures.items()}
            advance(1)
    columns = ("ranks", "rounds", "gloo us", "recursive us", "gloo skew us", "recursive skew us", "ratio")
    report.table("agree", (*columns, "gloo steps", "recursive steps"), rows)
    report.table("agree_faults", ("ranks", "fault", "named", "after s"), faults)
    return {**out, "named": all(f[2] == "by all" for f in faults), "cores": len(os.sched_getaffinity(0))}
