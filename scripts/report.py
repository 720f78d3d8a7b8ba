"""The result of a run: one flat JSON object, the last line of stdout, and result.json in Hydra's run folder."""

import json
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig


def run_folder() -> Path:
    """Hydra's folder of this run (or of this job of a sweep)."""
    return Path(HydraConfig.get().runtime.output_dir)


def emit(result: dict[str, Any]) -> None:
    """Print ``result`` as one JSON line and write it as result.json. Values are plain; keys keep their order.

    Nothing may be printed to stdout after this. Raises ValueError for NaN or infinity, which JSON has no word for.
    """
    for key, value in result.items():
        assert isinstance(value, (str, int, float, bool, type(None))), f"result {key!r} is a {type(value).__name__}"
    line = json.dumps(result, allow_nan=False)
    (run_folder() / "result.json").write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
