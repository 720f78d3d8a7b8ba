"""Train a small model with its tokenizer and drafter, and write it in the released layout.

    python -m scripts.train                                  # model=tiny, as shipped: about an hour on two cores
    python -m scripts.train resume=outputs/train/DAY/TIME    # continue an interrupted run
    python -m scripts.train short.steps=50 long.steps=5 drafter.steps=20 compile=false

Progress goes to stderr, one JSON line to stdout. GLIBC_TUNABLES=glibc.malloc.hugetlb=1 makes it a fifth faster.
"""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from model import dense, engram_tables
from model.config import ModelConfig
from scripts import build, memory
from scripts.entry import entry
from scripts.mapping import at_least, from_mapping
from scripts.progress import progress
from scripts.report import run_folder
from scripts.tracking import Track
from scripts.training import backbone, corpus, fast, init, quantise, run, state
from scripts.training.backbone import Setup
from scripts.training.export import export
from scripts.training.run import Settings
from serve.text import Text, normalise

NUMERICS = ("bf16", "qat")
LOG = "log.jsonl"


@dataclass(frozen=True)
class Job:
    """conf/train.yaml, checked."""

    model: ModelConfig
    training: Settings
    track: Track
    threads: int
    compile: bool
    numerics: str
    checkpoint: str | None
    resume: str | None

    def __post_init__(self):
        at_least(1, self, ("threads",))
        if self.numerics not in NUMERICS:
            raise ValueError(f"numerics must be one of {NUMERICS}, got {self.numerics!r}")
        for name in ("checkpoint", "resume"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty: give a folder, or leave {name}= out")


def build_job(config: DictConfig, overrides: Sequence[str] = ()) -> Job:
    """Raises ValueError naming the key, its value and what would do."""
    values = OmegaConf.to_container(config, resolve=True)
    groups = {
        "model": build.build_model_config(build.take_group(values, "model")),
        "track": from_mapping(Track, build.take_group(values, "track"), "track."),
    }
    training = {f.name: values.pop(f.name) for f in fields(Settings) if f.name in values}
    return from_mapping(Job, values, "", training=from_mapping(Settings, training, ""), **groups)


def prepare(job: Job, found: corpus.Corpus, text: Text) -> tuple[ModelConfig, Setup]:
    """The geometry with the tokenizer's own count of canonical ids, and what the phases need."""
    token_map, size = engram_tables.canonical_map(text.pieces(), text.raw_pieces(), normalise)
    cfg = replace(job.model, engram_compressed_vocab_size=size)
    numerics = quantise.straight_through() if job.numerics == "qat" else dense.Numerics()
    weights = quantise.weights(cfg) if job.numerics == "qat" else None
    ops, loss = dense.Ops(), backbone.head_loss
    if job.compile:
        ops, loss = fast.compiled_ops(), torch.compile(backbone.head_loss, dynamic=False)
    return cfg, Setup(cfg, dense.hash_tables(cfg, token_map), ops, loss, numerics, weights)


def main(job: Job) -> dict:
    torch.set_num_threads(job.threads)
    fast.keep_memory()
    size = sum(math.prod(shape) for shape in init.shapes(job.model).values())
    memory.require({memory.TRAINED: size * torch.float32.itemsize * 3}, torch.device("cpu"))
    folder, begun = run_folder(), time.perf_counter()
    if job.resume is not None:
        for name in (state.FILE, "tokenizer.json", "tokenizer_config.json"):
            if not (Path(job.resume) / name).is_file():
                raise ValueError(f"resume={job.resume}: no {name} there; give the folder of an interrupted run")
            shutil.copy(Path(job.resume) / name, folder / name)
    found = corpus.collect(corpus.library())
    if job.resume is None:
        run.make_tokenizer(found, job.model.vocab_size).save(folder)
    text = Text.load(folder)
    cfg, setup = prepare(job, found, text)
    now = run.fresh(cfg, job.training.seed) if job.resume is None else state.load(folder)
    tokens, result = run.tokenise(text, found), {}
    with open(folder / LOG, "a", encoding="utf-8") as log:
        for name in run.PHASES:
            plan, done = getattr(job.training, name), now.done.get(name, 0)
            with progress(name, (plan.steps - done) * plan.length * plan.rows, "tokens") as advance:
                for step in run.train(job.training, setup, tokens, now, folder, only=name):
                    advance(step.tokens)
                    log.write(run.log_line(step) + "\n")
                    log.flush()
                    result |= step.metrics
    where = Path(job.checkpoint) if job.checkpoint else folder / "checkpoint"
    size = export(where, cfg, now.params, text, corpus.manifest(found))
    return result | {"checkpoint": str(where), "bytes": size, "seconds": round(time.perf_counter() - begun, 1)}


if __name__ == "__main__":
    entry(main, build_job, "train")
