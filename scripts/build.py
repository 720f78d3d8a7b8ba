"""From YAML to dataclasses, and from those to the model: the one place that sees both.

`build_settings` turns a composed config into checked, frozen values; the other functions take those.
"""

import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from kernels import Kernels, choose
from kernels.registry import OPS
from model import checkpoint, engram_tables, transformer, tree
from model.cache import Layout
from model.config import FIXED, IGNORED_TEXT, QUANTIZATION, ModelConfig
from model.constants import constants
from model.runtime import Runtime
from parallel import hosttable, mesh, plan
from parallel.eplb.settings import Eplb
from parallel.mesh import Axis
from parallel.plan import Plan
from scripts import memory, workloads
from scripts.benches.sizes import Benches
from scripts.bytetext import ByteText
from scripts.evaluation.settings import Agreement, Evaluate, Needle, Routing
from scripts.mapping import at_least, from_mapping, known
from scripts.serving.api import Api
from scripts.serving.group import Restart
from scripts.serving.groups import Pool, build_pools
from scripts.tracking import Track
from scripts.workloads import Workload
from serve.router.choice import RouterRules
from serve.runner import Runner
from serve.settings import Serve
from serve.text import Text, normalise

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
SHIPPED = ROOT / "model" / "checkpoints" / "tiny"
RANDOM = "random"
MAX_THREADS = 1024
BESIDE = ("pools", "router", "restart")  # of the group serve, and not an engine's


@dataclass(frozen=True)
class Settings:
    """The root config, checked. ``model`` is that of ``checkpoint=random``; ``model_chosen``: the caller named it."""

    model: ModelConfig
    parallel: Plan
    kernels: Kernels
    serve: Serve
    pools: Mapping[str, Pool]
    router: RouterRules
    restart: Restart
    track: Track
    api: Api
    workload: Workload
    checkpoint: str
    numerics: str
    weights: str
    cache: str
    batch_invariant: bool
    device: str
    threads: int
    seed: int
    prompt: str | None
    prompt_file: str | None
    echo: bool
    max_tokens: int
    temperature: float
    speculate: bool
    golden: str | None
    eval: str
    evaluate: Evaluate
    needle: Needle
    agreement: Agreement
    routing: Routing
    bench: str
    benches: Benches
    target: str
    model_chosen: bool = False

    def __post_init__(self):
        build_runtime(self)  # numerics, cache
        if self.weights not in checkpoint.WEIGHTS:
            raise ValueError(f"weights must be one of {checkpoint.WEIGHTS}, got {self.weights!r}")
        at_least(1, self, ("threads",))
        if self.threads > MAX_THREADS:
            raise ValueError(f"threads must be <= {MAX_THREADS}, got {self.threads}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        for name in ("checkpoint", "golden"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty: give a folder, or leave {name}= out")

    @property
    def random(self) -> bool:
        return self.checkpoint == RANDOM


# --- values ---


def build_settings(config: DictConfig, overrides: Sequence[str] = ()) -> Settings:
    """Everything a script may use, from a composed config. ``overrides``: what the command line said, which tells a
    chosen model from the default one. Raises ValueError naming the key, its value and what would do."""
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    known(values, [f.name for f in fields(Settings) if f.name not in ("model_chosen", *BESIDE)], "")
    model = build_model_config(take_group(values, "model"))
    serving = dict(take_group(values, "serve"))
    beside = {name: serving.pop(name, None) for name in BESIDE}
    serve = from_mapping(Serve, serving, "serve.")
    made = {
        "model": model,
        "parallel": build_plan(take_group(values, "parallel"), model),
        "kernels": build_kernels(take_group(values, "kernels")),
        "serve": serve,
        "pools": build_pools(beside["pools"], serving, serve.handoff),
        "router": from_mapping(RouterRules, beside["router"] or {}, "serve.router."),
        "restart": from_mapping(Restart, beside["restart"] or {}, "serve.restart."),
        "track": from_mapping(Track, take_group(values, "track"), "track."),
        "api": from_mapping(Api, take_group(values, "api"), "api."),
        "workload": build_workload(take_group(values, "workload")),
        "model_chosen": any(o.lstrip("+~").startswith(("model=", "model.")) for o in overrides),
    }
    return from_mapping(Settings, values, "", **made)


def take_group(values: dict[str, Any], name: str) -> Mapping[str, Any]:
    """Take a config group out of ``values``. Raises ValueError naming the choices where none is there."""
    found = values.pop(name, None)
    if not isinstance(found, Mapping):
        raise ValueError(no_choice(name, found))
    return found


def choices(group: str) -> list[str]:
    """Names that a config group (``serve``, ``serve/policy``) has, none where there is no such group."""
    there = re.fullmatch(r"\w+(/\w+)*", group)
    return sorted(f.stem for f in (CONF / group).glob("*.yaml")) if there else []


def no_choice(group: str, value: Any) -> str:
    return f"{group} must be one of {', '.join(choices(group))}, got {'nothing' if value is None else value}"


def build_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The model of a ``conf/model`` YAML, whose fields are those of a released config.json's ``text_config``."""
    values = plain(values)
    known(values, [*(f.name for f in fields(ModelConfig)), *FIXED, *IGNORED_TEXT], "model.")
    root = {"text_config": values, "quantization_config": dict(QUANTIZATION)}
    try:
        return ModelConfig.from_hf(root)
    except ValueError as error:
        message = str(error).removeprefix("config.json: ").replace("text_config lacks", "lacks these fields:")
        raise ValueError(f"model: {message.replace('text_config.', '')}") from None


def build_plan(values: Mapping[str, Any], cfg: ModelConfig) -> Plan:
    """The plan of a ``conf/parallel`` YAML; every parameter of the model must have a rule that fits it."""
    values = plain(values)  # `engram` is for the rules to name
    known(values, ("axes", "agree", "dispatch", "engram", "eplb", "rules"), "parallel.", complete=True)
    eplb = from_mapping(Eplb, values["eplb"], "parallel.eplb.")
    made = plan.parse(values["axes"], values["rules"], values["agree"], eplb, values["dispatch"])
    if eplb.spare % made.world:
        raise ValueError(f"parallel.eplb.redundant must be a multiple of the {made.world} ranks, got {eplb.redundant}")
    made.check({path: spec.shape for path, spec in tree.walk(transformer.specs(cfg))})
    return made


def build_kernels(values: Mapping[str, Any]) -> Kernels:
    """Each op's backend: its own, or ``default``."""
    values = plain(values)
    known(values, ("default", *sorted(OPS)), "kernels.")
    named = {key: value for key, value in values.items() if value is not None}
    return choose(named.pop("default", "reference"), **named)


def build_workload(values: Mapping[str, Any]) -> Workload:
    """What scripts.run plays, of a ``conf/workload`` YAML; its ``kind`` says which fields it has."""
    return from_mapping(workloads.kind(values), values, "workload.")


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dicts, lists and scalars of a config node, interpolations resolved."""
    return OmegaConf.to_container(values, resolve=True) if isinstance(values, DictConfig) else dict(values)


# --- the model ---


def build_runtime(s: Settings, ep: Axis | None = None) -> Runtime:
    choice = {"numerics": s.numerics, "cache": s.cache, "batch_invariant": s.batch_invariant, "kernels": s.kernels}
    return Runtime(**choice, ep=ep or Axis(), dispatch=s.parallel.dispatch)


def build_layout(s: Settings, cfg: ModelConfig) -> Layout:
    return Layout(cfg, storage=s.cache, page_size=s.serve.page_size, redundant=s.parallel.eplb.spare)


def build_device(s: Settings) -> torch.device:
    """The device, which must be there; sets torch's thread count."""
    torch.set_num_threads(s.threads)
    count = torch.cuda.device_count()
    there = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if s.device not in there:
        raise ValueError(f"device={s.device} is not available; there is: {', '.join(there)}")
    return torch.device(s.device)


def checkpoint_config(s: Settings) -> ModelConfig:
    """The config of the model to run: that of the checkpoint's config.json, or ``model=`` where weights are random.

    Raises ValueError if the command line chose a model that is not the checkpoint's.
    """
    if s.random:
        return s.model
    if not Path(s.checkpoint).is_dir():
        raise ValueError(
            f"checkpoint={s.checkpoint}: no such folder; give a folder in the released layout, `checkpoint=random`, "
            "or train one with `python -m scripts.train`"
        )
    cfg = checkpoint.read_config(s.checkpoint)
    for f in fields(cfg) if s.model_chosen else ():
        mine, its = getattr(s.model, f.name), getattr(cfg, f.name)
        if mine != its:
            raise ValueError(
                f"model.{f.name}={mine} does not fit checkpoint={s.checkpoint}, whose config.json has {its}: "
                "a checkpoint brings its own model; leave model out, or use checkpoint=random"
            )
    return cfg


def build_text(s: Settings, cfg: ModelConfig) -> Text | ByteText:
    """The checkpoint's tokenizer. Random weights take the shipped one if vocabularies agree, else a token per byte."""
    if not s.random:
        text = Text.load(s.checkpoint)
        if text.vocab_size != cfg.vocab_size:
            raise ValueError(
                f"{s.checkpoint}: tokenizer.json has {text.vocab_size} tokens, config.json has vocab_size "
                f"{cfg.vocab_size}; the two files are not of one checkpoint"
            )
        return text
    if (SHIPPED / "tokenizer.json").is_file():
        text = Text.load(SHIPPED)
        if text.vocab_size == cfg.vocab_size:
            return text
    return ByteText(cfg.vocab_size, cfg.bos_token_id, cfg.eos_token_id)


def token_map(s: Settings, cfg: ModelConfig, text: Text | ByteText) -> list[int] | None:
    """Engram's map of token ids (spec section 8.1), None for random weights. Raises ValueError where the tokenizer does
    not belong to the config."""
    if s.random or not cfg.engram_layer_ids:
        return None
    ids, size = engram_tables.canonical_map(text.pieces(), text.raw_pieces(), normalise)
    if size != cfg.engram_compressed_vocab_size:
        raise ValueError(
            f"{s.checkpoint}: config.json has engram_compressed_vocab_size {cfg.engram_compressed_vocab_size}, "
            f"tokenizer.json folds to {size} ids; the two files are not of one checkpoint"
        )
    return ids


def build_model(
    s: Settings, rank: int | None = None, ep: Axis | None = None
) -> tuple[transformer.Model, Text | ByteText]:
    """Weights, constants and tokenizer, ready to run: what ``rank`` holds under the plan, where it has a seat."""
    device = build_device(s)
    if s.parallel.world > 1 and rank is None:
        raise ValueError(f"parallel: the plan has {s.parallel.world} ranks, this script runs one; use parallel=single")
    cfg = checkpoint_config(s)
    rt, layout = build_runtime(s, ep), build_layout(s, cfg)
    pools = memory.cache_bytes(layout, s.serve.pages + 1, s.serve.slots + 1, rt.dtype)
    node = hosttable.Node(mesh.store() if rank is not None else None)
    share = s.parallel, rank or 0, node.first
    memory.require(memory.model_bytes(cfg, s.numerics, s.weights, s.random, *share) | pools, device)
    text = build_text(s, cfg)
    consts = constants(cfg, token_map(s, cfg, text))
    how = {"numerics": s.numerics, "weights": s.weights, "device": device, "plan": s.parallel, "rank": rank or 0}
    how |= {"redundant": s.parallel.eplb.spare, "node": node}
    params = checkpoint.random(cfg, s.seed, **how) if s.random else checkpoint.load(s.checkpoint, cfg, **how)
    if node.pages:
        weakref.finalize(params, node.close)  # ranks that are slower to start still open its tables
        print(f"note: rank {rank or 0}: Engram tables: {node}", file=sys.stderr)
    consts = tree.build(lambda _, leaf: leaf.to(device), consts)
    return transformer.assemble(cfg, rt, layout, params, consts, device), text


def build_runner(s: Settings) -> tuple[Runner, Text | ByteText]:
    """A runner for the plain loop; number 0 of pages and slots is scratch."""
    model, text = build_model(s)
    return Runner(model, s.serve.pages + 1, s.serve.max_batch + 1, build_device(s)), text
