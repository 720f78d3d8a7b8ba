"""A golden case: a folder with config, weights, inputs and the official code's intermediate values.

B sequences of S prompt tokens and n decode tokens; a case may hold several such sets, ``seq0``, ``seq1``, ...
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.checkpoint import read_config
from model.config import ModelConfig
from model.shards import read_tensors


@dataclass(frozen=True)
class SequenceSet:
    """``expected`` keys have lost their ``seqI.`` prefix."""

    name: str
    prompt: np.ndarray  # [B, S] int64
    decode: np.ndarray  # [B, n] int64: token fed at each step, teacher forced
    expected: dict[str, Tensor]

    def get(self, key: str) -> Tensor | None:
        return self.expected.get(key)


@dataclass(frozen=True)
class Case:
    folder: Path
    cfg: ModelConfig
    token_map: list[int]
    sets: tuple[SequenceSet, ...]

    @property
    def weights(self) -> Path:
        return self.folder / "weights.safetensors"


def load_case(folder: str | Path, numerics: str) -> Case:
    """Read a case. Raises ValueError naming the file that is missing or unreadable."""
    folder = Path(folder)
    cfg = read_config(folder)
    inputs = read_tensors(folder / "inputs.safetensors")
    expected = read_tensors(folder / f"expected_{numerics}.safetensors")
    names = sorted({k.split(".")[0] for k in inputs}, key=lambda n: int(re.sub(r"\D", "", n) or 0))
    sets = []
    for name in names:
        for part in ("prompt", "decode_inputs"):
            if f"{name}.{part}" not in inputs:
                raise ValueError(f"{folder / 'inputs.safetensors'}: tensor {name}.{part} is missing")
        prompt, decode = (inputs[f"{name}.{part}"].long().numpy() for part in ("prompt", "decode_inputs"))
        own = {k.removeprefix(f"{name}."): v for k, v in expected.items() if k.startswith(f"{name}.")}
        sets.append(SequenceSet(name, prompt, decode, own))
    return Case(folder, cfg, _token_map(folder / "engram_tables.json", cfg), tuple(sets))


def _token_map(path: Path, cfg: ModelConfig) -> list[int]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a golden case has Engram's token map there")
    tables = json.loads(path.read_text(encoding="utf-8"))
    return list(tables["token_map"]) if "token_map" in tables else list(range(cfg.vocab_size))


def relative_rms(got: Tensor, want: Tensor) -> float:
    """RMS of the difference over the RMS of what is wanted; -inf (masked) must stand at the same places."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isinf(), want.isinf()):
        return float("inf")
    got, want = got.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0)
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=1e-12))


def largest(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; infinite where -inf is not at the same places."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isinf(), want.isinf()):
        return float("inf")
    return float((got.nan_to_num(neginf=0.0) - want.nan_to_num(neginf=0.0)).abs().max())
