"""Compressed keys and what is selected of them (spec section 6). Companion of model/dense.py.

B sequences, T tokens each, D model dim, C compressed entries.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.dense_ops import rope_angles
from model.dense_pass import Pass, Shared


def compress(run: Pass, layer: int, x: Tensor, shared: Shared) -> None:
    """Write a source layer's compressed keys and index keys (spec 6.1, 6.2)."""
    cfg, p, pre = run.cfg, run.p, f"layers.{layer}.attn"
    ratio, c = cfg.compress_ratios[layer], x.shape[1] // cfg.compress_ratios[layer]
    wkv = p[f"{pre}.compressor.wkv.weight"]
    if ratio == 1:
        pooled = F.linear(x, wkv)
    else:
        pairs = x[:, : c * 2].float().unflatten(1, (c, 2))
        weights = F.linear(pairs, p[f"{pre}.compressor.wgate.weight"].float()).softmax(2)
        pooled = (F.linear(pairs, wkv.float()) * weights).sum(2).to(x.dtype)
    latent = run.rms(pooled, f"{pre}.compressor.norm")
    angles = rope_angles(cfg, torch.arange(c) * ratio, True)
    source = latent.detach() if run.train_index else latent
    keys = run.rms(F.linear(source, p[f"{pre}.indexer.wk.weight"]), f"{pre}.indexer.k_norm")
    shared.index_keys = run.numerics.index(run.ops.rope(keys, *angles))
    shared.latent = run.numerics.latent(run.ops.rope(latent, *angles))


def reachable(t: int, c: int, ratio: int) -> Tensor:
    """[T, C]: entry j is complete once token (j + 1) * ratio - 1 has been processed."""
    return torch.arange(c) < (torch.arange(1, t + 1) // ratio)[:, None]


def select(run: Pass, layer: int, x: Tensor, qr: Tensor, shared: Shared) -> None:
    """Set ``shared.selection`` from this layer's index scores (spec 6.3 to 6.5); the source publishes candidates."""
    cfg, kind = run.cfg, run.cfg.kind(layer)
    c = shared.index_keys.shape[1]
    reach = reachable(x.shape[1], c, kind.source_ratio)[None]
    if not run.select and not run.train_index:
        shared.selection = reach
        return
    scores = index_scores(run, f"layers.{layer}.attn", x, qr, shared)
    if run.train_index:
        run.trace.scores[layer] = scores
    if not run.select:
        shared.selection = reach
        return
    scores = scores.detach().float().masked_fill(~reach, -math.inf)
    if kind.publishes:
        shared.candidates = candidate_mask(cfg, scores)
    if kind.obeys:
        scores = scores.masked_fill(~shared.candidates, -math.inf)
    shared.selection = largest(scores, min(cfg.index_topk, c))


def index_scores(run: Pass, pre: str, x: Tensor, qr: Tensor, shared: Shared) -> Tensor:
    """[B, T, C]: sum over index heads of weight * relu(query . key), in the activation type throughout."""
    cfg, (b, t, _) = run.cfg, x.shape
    if run.train_index:
        x, qr = x.detach(), qr.detach()
    angles = rope_angles(cfg, torch.arange(t), True)
    heads, dim = cfg.index_n_heads, cfg.index_head_dim
    q = run.numerics.index(run.ops.rope(run.linear(qr, f"{pre}.indexer.wq_b").view(b, t, heads, dim), *angles))
    w = F.linear(x, run.p[f"{pre}.indexer.weights_proj.weight"]) * (dim**-0.5 * heads**-0.5)
    total = None
    for h in range(heads):
        term = (q[:, :, h] @ shared.index_keys.transpose(1, 2)).relu() * w[:, :, h, None]
        total = term.float() if total is None else total + term
    return total.to(x.dtype)


def largest(scores: Tensor, k: int) -> Tensor:
    """The k largest of each row as a mask, lowest position first among equals (spec 6.5 leaves it open); never -inf."""
    least = scores.topk(k, dim=-1).values[..., -1:]
    above, tied = scores > least, (scores == least) & (scores > -math.inf)
    return above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def candidate_mask(cfg: ModelConfig, scores: Tensor) -> Tensor:
    """Entries in the best blocks, the block of the newest reachable entry always among them. scores [B, T, C]."""
    c, size = scores.shape[2], cfg.candidate_block_size
    blocks = -(-c // size)
    best = F.pad(scores, (0, blocks * size - c), value=-math.inf).unflatten(2, (blocks, size)).amax(-1)
    newest = (scores > -math.inf).sum(-1) - 1
    forced = F.one_hot((newest // size).clamp(min=0), blocks).bool() & (newest >= 0)[..., None]
    best = best.masked_fill(forced, math.inf)
    kept = largest(best, min(cfg.candidate_topk_blocks, blocks))
    return kept.repeat_interleave(size, dim=2)[..., :c]
