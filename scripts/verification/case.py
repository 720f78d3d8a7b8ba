"""A golden case: a folder with config, weights, inputs and the official code's intermediate values.

B sequences of S prompt tokens and n decode tokens; a case may hold several such sets, ``seq0``, ``seq1``, ...
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.checkpoint import read_config
from model.config import ModelConfig
from model.shards import read_json, read_tensors


@dataclass(frozen=True)
class SequenceSet:
    """``expected`` keys have lost their ``seqI.`` prefix; ``read`` notes those that a check has asked for."""

    name: str
    prompt: np.ndarray  # [B, S] int64
    decode: np.ndarray  # [B, n] int64: token fed at each step, teacher forced
    expected: dict[str, Tensor]
    read: set[str] = field(default_factory=set)

    def get(self, key: str) -> Tensor | None:
        if key in self.expected:
            self.read.add(key)
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
    if not names:
        raise ValueError(
            f"{folder / 'inputs.safetensors'}: holds no tensors; a case has seq0.prompt, seq0.decode_inputs"
        )
    sets = []
    for name in names:
        where = folder / "inputs.safetensors"
        prompt, decode = (_ids(inputs, f"{name}.{part}", where, cfg) for part in ("prompt", "decode_inputs"))
        if len(prompt) != len(decode) or prompt.shape[1] == 0:
            raise ValueError(f"{where}: {name} has prompts {prompt.shape} and decode inputs {decode.shape}")
        own = {k.removeprefix(f"{name}."): v for k, v in expected.items() if k.startswith(f"{name}.")}
        where = f"{folder / f'expected_{numerics}.safetensors'}: {name}"
        _check_expected(own, where, *prompt.shape, decode.shape[1], cfg.sliding_window)
        sets.append(SequenceSet(name, prompt, decode, own))
    for key in expected:
        if key.split(".")[0] not in names:
            raise ValueError(f"{folder / f'expected_{numerics}.safetensors'}: {key} is for a set that has no inputs")
    return Case(folder, cfg, _token_map(folder / "engram_tables.json", cfg), tuple(sets))


def _ids(inputs: dict[str, Tensor], key: str, where: Path, cfg: ModelConfig) -> np.ndarray:
    """Token ids [B, n] of one input. Raises ValueError naming the tensor and what is wrong with it."""
    if key not in inputs:
        raise ValueError(f"{where}: tensor {key} is missing; a case has seqI.prompt and seqI.decode_inputs")
    ids = inputs[key]
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"{where}: tensor {key} must be integers [B, n], got {ids.dtype} {tuple(ids.shape)}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < cfg.vocab_size:
        raise ValueError(f"{where}: tensor {key} holds ids outside 0..{cfg.vocab_size - 1}")
    return ids.long().numpy()


def _check_expected(own: dict[str, Tensor], where: str, rows: int, length: int, steps: int, window: int) -> None:
    """Raise ValueError unless there are expected values, for as many sequences, tokens and steps as the inputs have."""
    if not own:
        raise ValueError(f"{where} has no expected values; keys start with the set's name")
    for key, value in own.items():
        step = re.match(r"(?:\w+\.)*?decode\.(\d+)\.", key)
        if step and int(step[1]) >= steps:
            raise ValueError(f"{where}.{key}: the inputs have {steps} decode steps")
        if key.startswith("replay_") and length <= window:
            raise ValueError(f"{where}.{key}: replay needs prompts longer than the window of {window}, got {length}")
        prefill = key.startswith("prefill.") and not key.endswith(("gate_ids", "gate_weights"))
        if prefill and value.shape[0] != rows:
            raise ValueError(f"{where}.{key}: is for {value.shape[0]} sequences, the inputs have {rows}")
        if key.endswith(("logits_all", "out_stream", "out_pre_mix", "attn_out", "ffn_out")) and prefill:
            if value.shape[1] != length:
                raise ValueError(f"{where}.{key}: is for {value.shape[1]} tokens, the prompts have {length}")


def _token_map(path: Path, cfg: ModelConfig) -> list[int]:
    tokens = read_json(path).get("token_map")
    if not cfg.engram_layer_ids and tokens is None:
        return list(range(cfg.vocab_size))
    if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
        raise ValueError(f"{path}: token_map must be a list of integers, one a token")
    if len(tokens) != cfg.vocab_size:
        raise ValueError(f"{path}: token_map has {len(tokens)} tokens, config.json has vocab_size {cfg.vocab_size}")
    size, low, high = cfg.engram_compressed_vocab_size, min(tokens), max(tokens)
    if cfg.engram_layer_ids and not 0 <= low <= high < size:
        raise ValueError(
            f"{path}: token_map has ids {low}..{high}, config.json has engram_compressed_vocab_size {size}"
        )
    return tokens


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
