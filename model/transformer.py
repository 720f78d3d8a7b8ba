"""The whole model: parameters, and one ragged forward for prefill, decode, verify and replay (spec section 3).

N rows, C streams, D model dim, M rows whose logits are wanted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels.linear import linear, rms_norm
from kernels.mhc import mhc_collapse
from model import block, dspark, engram, tree
from model.batch import Batch, Carry, Constants, View, look
from model.cache import Address, Cache, Layout
from model.config import ModelConfig
from model.runtime import Runtime
from model.tree import Spec
from parallel import expert
from parallel.expert import Placement


@tree.node
class LayerParams:
    engram: engram.EngramParams | None
    block: block.BlockParams


@tree.node
class ModelParams:
    embed: Tensor  # [V, D]
    head: Tensor  # [V, D] fp32
    norm: Tensor  # [D]
    layers: tuple[LayerParams, ...]
    mtp: tuple[dspark.StageParams, ...]


def specs(cfg: ModelConfig) -> ModelParams:
    v, d = cfg.vocab_size, cfg.hidden_size
    rows = dict(zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True))
    return ModelParams(
        embed=Spec((v, d)),
        head=Spec((v, d), promote=True, scale=d**-0.5),
        norm=Spec((d,), init="ones"),
        layers=tuple(
            LayerParams(
                engram=engram.specs(cfg, rows[i]) if i in rows else None,
                block=block.specs(cfg, cfg.kind(i), cfg.n_routed_experts),
            )
            for i in range(cfg.num_hidden_layers)
        ),
        mtp=dspark.specs(cfg),
    )


@dataclass(frozen=True)
class Model:
    """The static half of a forward (``cfg``, ``rt``, ``layout``) beside the tensors that never change during a run.

    ``jit(fn, *static)`` gives ``fn`` with its static arguments bound, compiled or not: the runner's choice.
    """

    cfg: ModelConfig
    rt: Runtime
    layout: Layout
    params: ModelParams
    consts: Constants
    addresses: tuple[Address, ...]
    places: tuple[Placement, ...]  # of each layer's experts, then of each drafter stage's
    jit: Callable = partial


def assemble(
    cfg: ModelConfig, rt: Runtime, layout: Layout, params: ModelParams, consts: Constants,
    device: torch.device | str = "cpu",
) -> Model:  # fmt: skip
    """The model with its experts spread evenly over ``rt.ep``, and ``layout.redundant`` slots for second replicas."""
    counts = [cfg.n_routed_experts] * cfg.num_hidden_layers
    counts += [cfg.dspark_n_routed_experts] * cfg.num_nextn_predict_layers
    places = tuple(expert.spread(count, rt.ep, layout.redundant, device) for count in counts)
    return Model(cfg, rt, layout, params, consts, layout.addresses(device), places)


@dataclass(frozen=True)
class Trim:
    """Layers from ``layer`` on run only on ``rows`` [M] of the step, described by ``batch`` (bounded replay, spec 13).

    A source layer at ``layer`` still writes its global rows for every row first. With ``whole_windows`` the kept rows
    see at ``layer`` the keys of all rows (13.3, exact relative to a cut one layer later); else only each other.
    """

    layer: int
    rows: Tensor
    batch: Batch
    whole_windows: bool = False


def begin(
    cfg: ModelConfig, rt: Runtime, layout: Layout, embed: Tensor, consts: Constants, batch: Batch, cache: Cache
) -> tuple[View, Carry]:
    """What the rows see, and the streams: the embedding copied C times, collapsed by a one-hot pre-mix."""
    x = embed[batch.tokens].unsqueeze(1).repeat(1, cfg.hc_mult, 1)
    n = x.shape[0]
    pre = x.new_zeros((n, cfg.hc_mult), dtype=torch.float32)
    pre[:, 0] = 1
    latents = batch.page_tables.shape[1] * (layout.page_size // cfg.compress_ratios[cfg.last_source])
    topk_idxs = batch.positions.new_full((n, cfg.index_topk), -1)
    width = -(-latents // max(cfg.candidate_block_size, 1))  # 0 is allowed where no layer publishes candidates
    blocks = torch.zeros((n, width), dtype=torch.bool, device=x.device)
    return look(cfg, layout, consts, batch, cache), Carry(x=x, pre=pre, topk_idxs=topk_idxs, blocks=blocks)


def tap(x: Tensor) -> Tensor:
    """A layer's input as the drafter sees it: the mean of its streams, [N, C, D] -> [N, D]."""
    return x.float().mean(1).to(x.dtype)


def hidden(rt: Runtime, carry: Carry) -> Tensor:
    """The final collapse, before the norm: [N, D]."""
    return mhc_collapse(carry.pre, carry.x, backend=rt.kernels.mhc_collapse)


def logits(cfg: ModelConfig, rt: Runtime, norm: Tensor, head: Tensor, y: Tensor) -> Tensor:
    """fp32 logits [M, V] of collapsed rows y [M, D]."""
    y = rms_norm(y, norm, cfg.rms_norm_eps, backend=rt.kernels.rms_norm)
    return linear(y.float(), head, backend=rt.kernels.linear)


def finish(cfg: ModelConfig, rt: Runtime, norm: Tensor, head: Tensor, carry: Carry, rows: Tensor) -> Tensor:
    """Logits [M, V] of the wanted rows [M]."""
    return logits(cfg, rt, norm, head, hidden(rt, carry)[rows])


def take(carry: Carry, rows: Tensor) -> Carry:
    """The carry of some rows only."""
    return Carry(x=carry.x[rows], pre=carry.pre[rows], topk_idxs=carry.topk_idxs[rows], blocks=carry.blocks[rows])


def layer_step(m: Model, i: int, batch: Batch, view: View, cache: Cache, carry: Carry) -> Carry:
    """Block ``i`` on the carry."""
    p, at = m.params.layers[i].block, m.addresses[i]
    return block.apply(m.jit, m.cfg, m.rt, m.layout, m.cfg.kind(i), p, m.places[i], at, batch, view, cache, carry)


def cut_step(
    m: Model, i: int, batch: Batch, view: View, cache: Cache, carry: Carry, trim: Trim, late: View, kept: Carry
) -> Carry:
    """Block ``i`` where a trim begins: its global rows of every row of the step, all else of the ``kept`` rows."""
    p, at, kind = m.params.layers[i].block, m.addresses[i], m.cfg.kind(i)
    if trim.whole_windows:
        return block.narrow(
            m.jit,
            m.cfg,
            m.rt,
            m.layout,
            kind,
            p,
            m.places[i],
            at,
            batch,
            view,
            cache,
            carry,
            trim.rows,
            (trim.batch, late, kept),
        )
    if kind.ratio:
        write = m.jit(block.publish, m.cfg, m.rt, m.layout, kind)
        write(p.attn_norm, p.attn, at, batch, view, cache, carry)
    kind = replace(kind, ratio=0)  # written
    return block.apply(m.jit, m.cfg, m.rt, m.layout, kind, p, m.places[i], at, trim.batch, late, cache, kept)


def engram_step(m: Model, i: int, view: View, carry: Carry) -> Carry:
    """The Engram in front of layer ``i``, if it has one."""
    p = m.params.layers[i].engram
    if p is None:
        return carry
    index = m.cfg.engram_layer_ids.index(i)
    rows = m.cfg.engram_num_embeddings[index]
    whole = m.rt.ep.size == 1 or p.embed.weight.shape[0] == rows
    step = m.jit(engram.apply, m.cfg, m.rt, 0 if whole else -(-rows // m.rt.ep.size))
    return replace(carry, x=step(p, m.consts.hashes[index], view.history, carry.x))


def forward(
    m: Model, cache: Cache, batch: Batch, rows: Tensor, trim: Trim | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One step of the backbone. Writes ``cache`` in place.

    ``rows`` [M]: rows whose logits are wanted, numbered after the trim if there is one. Returns logits [M, V] fp32 and
    the drafter's taps, each [rows of the last layers, D]; with a drafter, its context rows are in the rings too.
    """
    view, carry = m.jit(begin, m.cfg, m.rt, m.layout)(m.params.embed, m.consts, batch, cache)
    taps: list[Tensor] = []
    for i in range(m.cfg.num_hidden_layers):
        carry = engram_step(m, i, view, carry)
        cut = trim is not None and i == trim.layer
        if cut:
            taps = [t[trim.rows] for t in taps]
            late, kept = m.jit(look, m.cfg, m.layout)(m.consts, trim.batch, cache), take(carry, trim.rows)
        if i in m.cfg.dspark_target_layer_ids:
            taps.append(m.jit(tap)(kept.x if cut else carry.x))
        if not cut:
            carry = layer_step(m, i, batch, view, cache, carry)
            continue
        carry = cut_step(m, i, batch, view, cache, carry, trim, late, kept)
        batch, view = trim.batch, late
    out = m.jit(finish, m.cfg, m.rt)(m.params.norm, m.params.head, carry, rows)
    if m.params.mtp:
        absorb = m.jit(dspark.absorb, m.cfg, m.rt)
        absorb(m.params.mtp, m.addresses[m.cfg.num_hidden_layers :], tuple(taps), view, cache)
    return out, tuple(taps)
