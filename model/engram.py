"""Engram (spec section 8): rows of a hashed n-gram table, gated into the streams.

N rows, C streams, D model dim, n = max n-gram, M = (n - 1) * heads columns, W row width.
"""

import torch
from torch import Tensor

from kernels.engram import engram_gather, engram_hash, engram_mix
from kernels.linear import quant_linear
from model import tree
from model.batch import HashConstants
from model.config import ModelConfig
from model.exchange import fetched_rows
from model.runtime import Runtime
from model.tree import Quantized, Spec
from parallel import expert


@tree.node
class EngramParams:
    embed: Quantized  # [rows, W] e4m3 with one scale per 32 of a row
    wkv: Quantized  # [(C + 1) * D, M * W]
    q_weight: Tensor  # [C, D]
    k_weight: Tensor  # [C, D]


def specs(cfg: ModelConfig, rows: int) -> EngramParams:
    c, d, w = cfg.hc_mult, cfg.hidden_size, cfg.engram_head_dim
    wide = cfg.engram_columns * w
    return EngramParams(
        embed=Spec((rows, w), "fp8", rowwise=True),
        wkv=Spec(((c + 1) * d, wide), "fp8", scale=wide**-0.5),
        q_weight=Spec((c, d), bare=True, init="ones"),
        k_weight=Spec((c, d), bare=True, init="ones"),
    )


def apply(
    cfg: ModelConfig, rt: Runtime, held: int, p: EngramParams, hashes: HashConstants, history: Tensor, x: Tensor
) -> Tensor:
    """Add each stream's gated table value: x [N, C, D] -> [N, C, D]; history [N, n] compressed ids, newest first.

    ``held`` rows of the table are on each rank of ``rt.ep``, 0 if every rank has all of them.
    """
    ids = engram_hash(history, hashes.multipliers, hashes.primes, hashes.offsets, backend=rt.kernels.engram_hash)
    rows = look_up(rt, held, p.embed, ids, x.dtype)
    kv = quant_linear(rows, p.wkv.weight, p.wkv.scale, rt.qat, backend=rt.kernels.quant_linear)
    return engram_mix(x, kv, p.q_weight, p.k_weight, cfg.rms_norm_eps, backend=rt.kernels.engram_mix)


def look_up(rt: Runtime, held: int, table: Quantized, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Table rows ids [N, M], joined: [N, M * W]. A sharded table is read where its rows are, for all ranks' ids; one
    in host memory by the host."""
    gather = rt.kernels.engram_gather
    if not held:
        there = ids.to(table.weight.device)
        return engram_gather(table.weight, table.scale, there, dtype, backend=gather).to(ids.device)
    if rt.dispatch == "alltoall":
        where = rt.ep.size, rt.ep.rank, rt.ep.group
        return fetched_rows(table.weight, table.scale, ids, dtype, held, gather, *where)
    mine = expert.local(rt.ep, expert.gather(rt.ep, ids), held)
    there = mine < table.weight.shape[0]  # the last rank may hold fewer
    rows = engram_gather(table.weight, table.scale, torch.where(there, mine, 0), dtype, backend=gather)
    rows = torch.where(there.unsqueeze(-1), rows.unflatten(1, (ids.shape[1], -1)), 0)
    return expert.combine(rt.ep, rows.flatten(1))
