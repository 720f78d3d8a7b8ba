"""What a training run keeps on disk: parameters, moments, and how far each phase is. Writes are atomic."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

FILE = "state.pt"


@dataclass
class State:
    """``params`` fp32 by release names; ``moments`` per set of trained parameters; ``done`` steps per phase."""

    params: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)


def save(state: State, folder: Path) -> None:
    part = folder / (FILE + ".part")
    torch.save({"params": state.params, "moments": state.moments, "done": state.done}, part)
    os.replace(part, folder / FILE)


def load(folder: Path) -> State:
    """ValueError if the folder holds no readable state."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"nothing to resume in {folder}: it has no {FILE}")
    try:
        return State(**torch.load(path, weights_only=True, mmap=False))
    except Exception as e:  # torch.load raises whatever broken bytes lead it to
        raise ValueError(f"cannot resume from {path}: {e}") from e
