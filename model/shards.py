"""Files of a checkpoint: safetensors shards with their index, opened lazily, checked by headers, written whole.

A checkpoint is a folder with `model.safetensors`, or shards with `model.safetensors.index.json`; without an index every
.safetensors file of the folder counts, and a single such file can be named itself. Nothing here unpickles. Every error
is a ValueError that names the file, the tensor or field, and what would do.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import release
from model.release import Cut, Entry

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Stored = Callable[[Entry], tuple[Tensor, Tensor | None]]  # weight entry -> (weight, scale) as stored


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ValueError(f"{path}: cannot be read ({err.strerror}); name the folder of a checkpoint") from None
    except ValueError as err:  # JSONDecodeError, UnicodeDecodeError
        raise ValueError(f"{path}: not valid JSON ({err}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file that is not a checkpoint, by name."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as err:
        raise ValueError(f"{path}: cannot be read as safetensors ({err})") from None


class Shards:
    """The open shards of one checkpoint: which file holds which tensor, known from their headers alone."""

    def __init__(self, where: str | Path):
        self.where = Path(where)
        self.stack = contextlib.ExitStack()
        self.files: dict[str, Any] = {}  # file name -> open handle
        self.home: dict[str, str] = {}  # tensor -> file name
        self.listed: dict[str, str] | None = None  # what the index says of `home`, where there is one

    def __enter__(self) -> "Shards":
        with contextlib.ExitStack() as guard:
            guard.push(self.stack)
            for name in self._file_names():
                self._open(name)
            self._check_index()
            guard.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def _folder(self) -> Path:
        return self.where if self.where.is_dir() else self.where.parent

    def _file_names(self) -> list[str]:
        if self.where.is_file():
            return [self.where.name]
        if not self.where.is_dir():
            raise ValueError(f"{self.where}: no such checkpoint folder or .safetensors file")
        if (self.where / INDEX).is_file():
            return self._indexed()
        names = sorted(p.name for p in self.where.glob("*.safetensors"))
        if not names:
            raise ValueError(f"{self.where}: holds neither {INDEX} nor a .safetensors file")
        return names

    def _indexed(self) -> list[str]:
        path = self.where / INDEX
        where = read_json(path).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(v, str) for v in where.values()):
            raise ValueError(f"{path}: 'weight_map' must be an object of tensor name -> file name")
        names = sorted(set(where.values()))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{path}: 'weight_map' must name files of its own folder, got {name!r}")
            if not (self.where / name).is_file():
                lost = next(k for k, v in where.items() if v == name)
                raise ValueError(f"{path}: names {name} (for {lost!r}), which is not there; fetch that file")
        self.listed = where
        return names

    def _check_index(self) -> None:
        """The index and the headers say the same: no tensor that its file lacks, none that the index leaves out."""
        if self.listed is None:
            return
        index, again = self.where / INDEX, "fetch the index and that file again, from one source"
        for tensor, name in self.listed.items():
            held = self.home.get(tensor)
            if held != name:
                where = "no file does" if held is None else f"{held} does"
                raise ValueError(f"{index}: says that {name} holds tensor {tensor!r}, but {where}; {again}")
        for tensor, name in self.home.items():
            if tensor not in self.listed:
                raise ValueError(f"{self.where / name}: holds tensor {tensor!r}, which {INDEX} does not list; {again}")

    def _open(self, name: str) -> None:
        path = self._folder() / name
        try:
            handle = self.stack.enter_context(safe_open(str(path), "pt"))
            keys = list(handle.keys())
        except (SafetensorError, OSError) as err:
            raise ValueError(f"{path}: truncated or corrupt ({err}); fetch the file again") from None
        self.files[name] = handle
        for key in keys:
            if key in self.home:
                raise ValueError(f"{path}: tensor {key!r} is in {self.home[key]} too; keep one of them")
            self.home[key] = name

    def path(self, tensor: str) -> Path:
        return self._folder() / self.home[tensor]

    def check(self, schema: Mapping[str, Entry]) -> None:
        """Names, types and shapes against the schema, from the headers. Raises on the first that differs."""
        for name in self.home:
            if name not in schema and not release.skipped(name):
                raise ValueError(f"{self.path(name)}: unknown tensor {name!r}; does config.json belong to this file?")
        for name, want in schema.items():
            if want.part == "ignored":
                continue
            if name not in self.home:
                raise ValueError(f"{self.where}: tensor {name!r} is missing; fetch the shard that holds it")
            header = self.files[self.home[name]].get_slice(name)
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            if dtype != want.dtype:
                raise ValueError(f"{self.path(name)}: tensor {name!r} must be {want.dtype}, got {dtype}")
            if shape != want.shape:
                raise ValueError(
                    f"{self.path(name)}: tensor {name!r} must have shape {want.shape} by config.json, got {shape}"
                )

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """The tensor, or a cut of it: a view of the file's pages, to be copied. Raises on NaN or infinity."""
        handle = self.files[self.home[name]]
        if cut is None:
            value = handle.get_tensor(name)
        else:
            dim, start, stop = cut
            value = handle.get_slice(name)[(*[slice(None)] * dim, slice(start, stop))]
        if not is_finite(value):
            raise ValueError(f"{self.path(name)}: tensor {name!r} holds NaN or infinity; fetch the file again")
        return value


def is_finite(value: Tensor) -> bool:
    """No NaN or infinity; packed FP4 has no code for either."""
    if value.numel() == 0:
        return True
    if value.dtype == torch.float8_e8m0fnu:
        return int(value.view(torch.uint8).amax()) != 0xFF
    if value.dtype == torch.float8_e4m3fn:
        return not bool(((value.view(torch.uint8) & 0x7F) == 0x7F).any())
    if value.dtype in (torch.bfloat16, torch.float32):
        return bool(torch.stack(value.aminmax()).isfinite().all())
    return True


# --- writing ---


def write_shards(where: Path, schema: Mapping[str, Entry], stored: Stored, shard_bytes: int) -> None:
    """Shards and their index, in schema order; ``stored`` makes one weight at a time.

    Each file appears whole or not at all; files of an older save go last.
    """
    where.mkdir(parents=True, exist_ok=True)
    groups = list(_groups(schema, shard_bytes))
    total = len(groups)
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)] if total > 1 else [SINGLE]
    for name, group in zip(names, groups):
        part = where / f"{name}.part"
        save_file(dict(_values(group, stored)), part, metadata={"format": "pt"})
        os.replace(part, where / name)
    if total > 1:
        size = sum(entry.nbytes for group in groups for entry in group)
        homes = {entry.name: name for name, group in zip(names, groups) for entry in group}
        write_json(where / INDEX, {"metadata": {"total_size": size}, "weight_map": homes})
    else:
        (where / INDEX).unlink(missing_ok=True)
    for old in where.glob("model*.safetensors"):
        if old.name not in names:
            old.unlink()


def _groups(schema: Mapping[str, Entry], shard_bytes: int) -> Iterator[list[Entry]]:
    """Entries in order, cut before a weight that no longer fits; what goes with a weight stays beside it."""
    group: list[Entry] = []
    size = 0
    for entry in schema.values():
        if group and entry.part == "weight" and size + entry.nbytes > shard_bytes:
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.nbytes
    yield group


def _values(group: list[Entry], stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one shard. The gate's ``bias_vl``, for image tokens only, repeats the bias before it."""
    weight = scale = None
    for entry in group:
        if entry.part == "weight":
            weight, scale = stored(entry)
        value = scale if entry.part == "scale" else weight
        if tuple(value.shape) != entry.shape:
            raise ValueError(f"tensor {entry.name!r} must have shape {entry.shape}, got {tuple(value.shape)}")
        yield entry.name, value.clone(memory_format=torch.contiguous_format)


def write_json(path: Path, value: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
