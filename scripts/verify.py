"""Check the model against golden cases of the official code.

    python -m scripts.verify golden=DIR [numerics=fp32|qat] [kernels=reference|compile] [cache=plain|packed]

Prints a table tap -> largest error -> limit, and the keys of the files that nothing was compared with; exit code 1 on
any miss, a key of the format that was left out included.
"""

from dataclasses import replace
from pathlib import Path

import torch

from model import checkpoint
from model.constants import constants
from model.transformer import Model, assemble
from scripts import memory
from scripts.build import ROOT, Settings, build_device, build_layout, build_runtime
from scripts.entry import entry
from scripts.progress import progress
from scripts.verification import checks
from scripts.verification.case import Case, load_case
from scripts.verification.forced import check_prefill
from scripts.verification.keys import check_keys
from scripts.verification.player import Player
from scripts.verification.table import Results

SHIPPED_CASES = ROOT / "tests" / "data" / "golden"


def build_case_model(s: Settings, case: Case) -> Model:
    """The case's weights under the chosen numerics, storage and kernels."""
    memory.require(memory.model_bytes(case.cfg, s.numerics, s.weights, drawn=False), torch.device(s.device))
    params = checkpoint.load(case.weights, case.cfg, numerics=s.numerics, weights=s.weights)
    layout = build_layout(s, case.cfg)
    return assemble(case.cfg, build_runtime(s), layout, params, constants(case.cfg, case.token_map))


def verify_case(s: Settings, folder: Path) -> Results:
    """All checks of one case."""
    case, results = load_case(folder, s.numerics), Results()
    player = Player(build_case_model(s, case), case.sets)
    other = None
    if s.cache == "packed":
        other = Player(build_case_model(replace(s, cache="plain"), case), case.sets)
    steps = [check_prefill, checks.check_chunks, checks.check_decode, checks.check_replay]
    with progress(folder.name, len(case.sets) * len(steps), "checks") as advance:
        for st in case.sets:
            for check in steps:
                check(player, st, results)
                advance(1)
            if other is not None:
                checks.check_storage(other, player, st, results)
            check_keys(st, player.recordable, results)
    results.show(f"{folder.name}: numerics={s.numerics} cache={s.cache} weights={s.weights}")
    return results


def cases(golden: str | None) -> list[Path]:
    """The folder given, or all that ship. Raises ValueError where there is no case."""
    if golden is None:
        return sorted(p.parent for p in SHIPPED_CASES.glob("*/config.json"))
    if not Path(golden).is_dir():
        raise ValueError(
            f"golden={golden}: no such folder; a case holds config.json, weights, inputs and expected values"
        )
    return [Path(golden)]


def run(s: Settings) -> dict:
    if build_device(s).type != "cpu":
        raise ValueError(f"device={s.device}: verify compares on the CPU; use device=cpu")
    found = [verify_case(s, folder) for folder in cases(s.golden)]
    return {
        "passed": sum(r.passed for r in found),
        "failed": sum(r.failed for r in found),
        "cases": len(found),
        "numerics": s.numerics,
        "cache": s.cache,
        "kernels": s.kernels.sparse_attention,
    }


if __name__ == "__main__":
    entry(run)
