"""From training parameters to a checkpoint folder in the released layout."""

import json
import shutil
from pathlib import Path

from torch import Tensor

from model import checkpoint
from model.config import ModelConfig
from scripts.training.backbone import Params
from serve.text import Text

STACKS = ("w1", "w3", "w2")


def release_names(params: Params) -> dict[str, Tensor]:
    """Parameters by released names: a layer's stacked experts taken apart."""
    out = {}
    for name, value in params.items():
        stem, _, last = name.rpartition(".")
        if last in STACKS and stem.endswith(".experts"):
            out |= {f"{stem}.{e}.{last}.weight": v for e, v in enumerate(value.unbind())}
        else:
            out[name] = value
    return out


def export(where: Path, cfg: ModelConfig, params: Params, text: Text, heldout: dict) -> int:
    """Write weights, config, tokenizer and ``heldout.json``; an older folder is replaced whole. Returns its bytes."""
    part = where.with_name(where.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    checkpoint.write_release(part, release_names(params), cfg)
    text.save(part)
    (part / "heldout.json").write_text(json.dumps(heldout, indent=1) + "\n")
    shutil.rmtree(where, ignore_errors=True)
    part.rename(where)
    return sum(f.stat().st_size for f in where.iterdir())
