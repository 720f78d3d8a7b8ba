"""What a run would take of memory, from shapes alone, and what the device has: compared before anything is made."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from model import checkpoint, release, transformer, tree
from model.cache import Layout
from model.config import ModelConfig
from parallel.plan import Plan

WEIGHTS, CACHE, DRAWN = "weights", "cache", "largest weight while it is drawn"
TRAINED = "weights, gradients and moments in fp32"
INSPECT = "`python -m scripts.inspect` tells what a model weighs"
SMALLER = {  # the largest part -> what makes it smaller
    WEIGHTS: f"take a smaller model, or weights=packed; {INSPECT}",
    DRAWN: f"take a smaller model; {INSPECT}",
    TRAINED: f"take a smaller model; {INSPECT}",
    CACHE: "lower serve.pages, serve.max_batch, serve.page_size or model.sliding_window",
}
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def model_bytes(
    cfg: ModelConfig, numerics: str, weights: str, drawn: bool, plan: Plan | None = None, rank: int = 0,
    first: bool = True,
) -> dict[str, int]:  # fmt: skip
    """Bytes of the weights that ``rank`` holds; ``drawn`` adds the fp32 values of the largest, made one at a time.
    Tables that a node's ranks share count for the ``first`` of them, which makes them."""
    specs = dict(tree.walk(transformer.specs(cfg)))
    held = 0
    for path, spec in specs.items():
        if plan and plan.rule(path).host and not first:
            continue
        part = checkpoint.part(plan, rank, path, spec, plan.eplb.spare if plan else 0)
        whole = release.held_bytes(spec, numerics, weights)
        if isinstance(part, list):  # experts, second replicas among them
            held += whole * len(part) // spec.shape[0]
        else:
            held += whole if part is None else whole * (part[2] - part[1]) // spec.shape[part[0]]
    return {WEIGHTS: held} | ({DRAWN: 4 * max(spec.numel for spec in specs.values())} if drawn else {})


def cache_bytes(layout: Layout, pages: int, slots: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the pools, scratch included."""
    return {CACHE: layout.cache_bytes(pages, slots, dtype)}


def require(needs: Mapping[str, int], device: torch.device) -> None:
    """Raise ValueError where the parts do not fit, naming each, what there is, and what would make them smaller."""
    total, there = sum(needs.values()), available(device)
    if total > there:
        parts = ", ".join(f"{name} {readable(size)}" for name, size in needs.items())
        remedy = SMALLER[max(needs, key=needs.get)]
        raise ValueError(f"this needs {readable(total)} ({parts}), {device} has {readable(there)} free: {remedy}")


def available(device: torch.device) -> int:
    """Bytes that may still be taken: of the GPU, or of this machine and of its container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    machine = int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(text) for text in map(_read, LIMITS) if text.strip().isdigit())])


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def readable(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
