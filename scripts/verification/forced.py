"""Prefill taps against the file: chained in fp32; in qat with each layer's input forced to the file's."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels import choose
from kernels.registry import recording
from model import transformer
from model.transformer import Model
from scripts.verification.case import SequenceSet
from scripts.verification.player import Player
from scripts.verification.table import FP32_LIMIT, NEAR_TIES, QAT_LIMIT, Results
from scripts.verification.taps import Pass, force_global_rows


class Trust:
    """Which inputs of the coming layer are the file's own, so that its bound applies."""

    def __init__(self, model: Model):
        self.cfg, self.qat = model.cfg, model.rt.qat
        self.stream = True  # x and pre
        self.sources: set[int] = set()  # layers whose global rows are right
        self.selection = True

    def layer(self, i: int) -> bool:
        source = self.cfg.source_of(i)
        kind = self.cfg.kind(i)
        own = source == i or source is None or source in self.sources
        return not self.qat or (self.stream and own and (kind.index or not kind.reads or self.selection))


def check_prefill(player: Player, st: SequenceSet, results: Results) -> None:
    """Compare every tap of the prefill that the file holds and this path can show."""
    model = player.runner.model
    seen = player.recordable
    with recording(model.rt.kernels.names()) as log:
        if seen:
            model = replace(model, rt=replace(model.rt, kernels=choose("recorded")))
        with torch.no_grad():
            _walk(Pass(model, *player.start(st), len(st.prompt), log), st, results)


def _walk(run: Pass, st: SequenceSet, results: Results) -> None:
    trust, model = Trust(run.m), run.m
    for i in range(model.cfg.num_hidden_layers):
        where = f"{st.name}.{i}"
        for name, got in run.engram(i).items():
            _compare(name, got, st.get(f"prefill.layers.{i}.{name}"), where, results, trust.qat, trust.stream)
        _force(run, st, i, ("engram_out",), trust)
        bounded = trust.layer(i)
        for name, got in run.layer(i).items():
            _compare(name, got, st.get(f"prefill.layers.{i}.{name}"), where, results, trust.qat, bounded)
        if trust.qat:
            _settle(run, st, i, trust, bounded)
    want = st.get("prefill.main_hidden")
    if want is not None:
        got = run.rows(torch.cat(run.inputs, -1))
        results.close("main_hidden", got, want, st.name, QAT_LIMIT if trust.qat else FP32_LIMIT)
    want = st.get("prefill.logits_all")
    if want is not None:
        p, cfg, rt = model.params, model.cfg, model.rt
        out = model.jit(transformer.finish, cfg, rt)(p.norm, p.head, run.carry, torch.arange(run.carry.x.shape[0]))
        if trust.qat:
            results.close("logits_all", run.rows(out), want, st.name, QAT_LIMIT if trust.stream else None)
        else:
            results.logits("logits_all", run.rows(out), want, st.name)


def _settle(run: Pass, st: SequenceSet, i: int, trust: Trust, bounded: bool) -> None:
    """After layer ``i``: take the file's stream, selection and global rows where it has them; note what is trusted."""
    kind = run.m.cfg.kind(i)
    trust.stream = _force(run, st, i, ("out_stream", "out_pre_mix"), trust)
    if kind.index:
        trust.selection = _force(run, st, i, ("topk_positions",), trust) or bounded
    if kind.publishes:
        _force(run, st, i, ("candidate_mask",), trust)
    if kind.ratio:
        rows = [st.get(f"prefill.layers.{i}.{name}") for name in ("compress_kv", "index_k")]
        if not bounded and None not in rows:
            force_global_rows(run.m, run.cache, run.batch, i, *rows)
            bounded = True
        trust.sources |= {i} if bounded else set()


PARTS = {
    "engram_out": "x",
    "out_stream": "x",
    "out_pre_mix": "pre",
    "topk_positions": "topk_idxs",
    "candidate_mask": "blocks",
}


def _force(run: Pass, st: SequenceSet, i: int, names: tuple[str, ...], trust: Trust) -> bool:
    """Put the file's values into the carry (qat only); whether all were there."""
    values = [st.get(f"prefill.layers.{i}.{name}") for name in names]
    if not trust.qat or any(v is None for v in values):
        return False
    for name, value in zip(names, values, strict=True):
        width = getattr(run.carry, PARTS[name]).shape[-1]
        if name == "topk_positions":
            value = torch.nn.functional.pad(value.long(), (0, width - value.shape[-1]), value=-1)
        if name == "candidate_mask":
            value = torch.nn.functional.pad(value, (0, width * run.m.cfg.candidate_block_size - value.shape[-1]))
            value = value.unflatten(-1, (width, -1)).amax(-1)
        run.force(**{PARTS[name]: value})
    if names == ("engram_out",):
        trust.stream = trust.stream or i == 0
    return True


def _compare(
    name: str, got: Tensor, want: Tensor | None, where: str, results: Results, qat: bool, bounded: bool
) -> None:
    """One tap; ids exactly in fp32, up to near ties in qat."""
    if want is None or want.numel() == 0:
        return
    limit = (QAT_LIMIT if qat else FP32_LIMIT) if bounded else None
    ties = (NEAR_TIES if qat else 0) if bounded else None
    if name in ("topk_positions", "candidate_mask", "index_score"):
        beyond = got[..., want.shape[-1] :]
        if name == "topk_positions":
            assert bool((beyond == -1).all()), f"{where}: more entries selected than the official code has"
        got = got[..., : want.shape[-1]]
    if name == "engram_hash_ids":
        results.ids(name, got.flatten(0, 1), want, where, 0)
    elif name == "gate_ids":
        results.ids(name, got.sort(-1).values, want.long().sort(-1).values, where, ties)
    elif name in ("topk_positions", "candidate_mask"):
        results.ids(name, got.flatten(0, 1), want, where, ties)
    elif name == "gate_weights":
        results.close(name, got.sort(-1).values, want.sort(-1).values, where, limit)
    else:
        results.close(name, got, want.to(got.dtype), where, limit)
