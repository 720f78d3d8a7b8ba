"""The model as whole sequences, differentiable: no caches, plain masks. Trains `tiny`, and checks the paged forward.

B sequences, T tokens each, N = B * T rows, D model dim, S streams, H heads, C compressed entries, E experts.
Parameters are a flat dict by release names (spec section 11); a layer's experts are one tensor [E, out, in].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig
from model.dense_index import compress, select
from model.dense_ops import rope_angles
from model.dense_pass import Numerics, Ops, Params, Pass, Shared, Trace  # noqa: F401  (callers take them from here)
from model.engram_tables import multipliers, offsets, primes


@dataclass(frozen=True)
class HashTables:
    """Engram's constants on the device of the ids (spec 8.2)."""

    token_map: Tensor  # [V] int64
    factors: Tensor  # [layers, G] int64
    sizes: Tensor  # [layers, cols] int64
    offsets: Tensor  # [layers, cols] int64


def hash_tables(cfg: ModelConfig, token_map: list[int]) -> HashTables:
    layers, size = cfg.engram_layer_ids, max(token_map) + 1
    if size != cfg.engram_compressed_vocab_size:
        raise ValueError(f"engram_compressed_vocab_size {cfg.engram_compressed_vocab_size}: the tokenizer gives {size}")
    tables = primes(len(layers), cfg.engram_vocab_size, cfg.engram_max_ngram_size, cfg.engram_n_heads)
    return HashTables(
        torch.tensor(token_map),
        torch.tensor([multipliers(i, size, cfg.engram_max_ngram_size) for i in layers]),
        torch.tensor([[n for row in t for n in row] for t in tables]),
        torch.tensor([offsets(t) for t in tables]),
    )


def hash_rows(cfg: ModelConfig, tables: HashTables, ids: Tensor) -> Tensor:
    """ids [B, T] -> table rows [layers, B, T, cols]; tokens before the first count as padding (spec 8.3)."""
    canonical = tables.token_map[ids]
    pad = int(tables.token_map[cfg.engram_pad_token_id])
    total, columns = None, []
    for back in range(cfg.engram_max_ngram_size):
        shifted = F.pad(canonical, (back, 0), value=pad)[:, : ids.shape[1]]
        term = shifted * tables.factors[:, back, None, None]
        total = term if total is None else total ^ term
        if back:
            columns += [total] * cfg.engram_n_heads
    return torch.stack(columns, -1) % tables.sizes[:, None, None] + tables.offsets[:, None, None]


def forward(run: Pass, ids: Tensor, rows: Tensor, last_layer: int | None = None) -> Tensor:
    """ids [B, T], rows [layers, B, T, cols] -> normed hidden [B, T, D]; multiply by ``head`` for logits.

    Fills ``run.trace``. ``last_layer`` stops after that layer (index training needs no head).
    """
    cfg, p = run.cfg, run.p
    x, a = streams(run, ids)
    shared = Shared()
    for layer in range(cfg.num_hidden_layers):
        if layer in cfg.engram_layer_ids:
            x = engram(run, f"layers.{layer}.engram", x, rows[cfg.engram_layer_ids.index(layer)].flatten(0, 1))
        if layer in cfg.dspark_target_layer_ids:
            run.trace.taps.append(x.float().mean(1).to(x.dtype).unflatten(0, ids.shape))
        x, a = block(run, layer, x, a, shared)
        if layer == last_layer:
            break
    return run.ops.collapse(a, x, p["norm.weight"], cfg.rms_norm_eps).unflatten(0, ids.shape)


def streams(run: Pass, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids, any shape of N -> the embedding in every stream [N, S, D] and the first pre-mix, one-hot [N, S]."""
    h = F.embedding(ids.flatten(), run.p["embed.weight"])
    x = h[:, None].expand(-1, run.cfg.hc_mult, -1).contiguous()
    return x, F.one_hot(torch.zeros(h.shape[0], dtype=torch.long), run.cfg.hc_mult).float()


def block(run: Pass, layer: int, x: Tensor, a: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """A backbone layer. x [N, S, D], a [N, S] -> the same."""

    def attend(u: Tensor) -> Tensor:
        return attention(run, layer, u.unflatten(0, (run.batch, -1)), shared).flatten(0, 1)

    x, a, run.trace.loads[layer] = halves(run, f"layers.{layer}", x, a, attend, run.cfg.num_experts_per_tok)
    return x, a


def halves(
    run: Pass, pre: str, x: Tensor, a: Tensor, attend: Callable[[Tensor], Tensor], k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention, then experts, with lagged mixing (spec section 4): each half is read with the mix of the half before.

    x [N, S, D], a [N, S]; ``attend`` maps [N, D] to [N, D] -> x, a and tokens per expert [E].
    """
    cfg, ops, loads = run.cfg, run.ops, []

    def think(u: Tensor) -> Tensor:
        out, load = moe(run, pre + ".ffn", u, k)
        loads.append(load)
        return out

    for half, f in (("attn", attend), ("ffn", think)):
        next_a, q, c = ops.mix(x, *mix_params(run.p, pre, half), cfg.hc_sinkhorn_iters, cfg.hc_eps)
        u = ops.collapse(a, x, run.p[f"{pre}.{half}_norm.weight"], cfg.rms_norm_eps)
        x, a = ops.post(f(u), x, q, c), next_a
    return x, a, loads[0]


def mix_params(p: Params, pre: str, half: str) -> tuple[Tensor, Tensor, Tensor]:
    return p[f"{pre}.hc_{half}_fn"], p[f"{pre}.hc_{half}_scale"], p[f"{pre}.hc_{half}_base"]


def attention(run: Pass, layer: int, x: Tensor, shared: Shared) -> Tensor:
    """x [B, T, D], normed -> [B, T, D]. Sources first write ``shared`` (spec sections 5 and 6)."""
    cfg, pre, ops = run.cfg, f"layers.{layer}.attn", run.ops
    kind, (b, t, _) = cfg.kind(layer), x.shape
    angles = rope_angles(cfg, torch.arange(t), kind.reads)
    qr = run.rms(run.linear(x, f"{pre}.wq_a"), f"{pre}.q_norm")
    q = ops.rope(run.linear(qr, f"{pre}.wq_b").view(b, t, cfg.num_attention_heads, cfg.head_dim), *angles)
    k = run.numerics.act(ops.rope(run.rms(run.linear(x, f"{pre}.wkv"), f"{pre}.kv_norm"), *angles))
    latent = selection = None
    if kind.reads:
        if kind.ratio:
            compress(run, layer, x, shared)
        if kind.index:
            select(run, layer, x, qr, shared)
        latent, selection = shared.latent, shared.selection
        if run.train_index:
            run.trace.targets[layer] = (q.detach(), latent.detach())
    o = ops.attend(q, k, latent, selection, run.p[f"{pre}.attn_sink"], cfg.sliding_window)
    return project_out(run, pre, ops.rope(o, angles[0], -angles[1]))


def project_out(run: Pass, pre: str, o: Tensor) -> Tensor:
    """Grouped output projection: o [B, T, H, head_dim], rotated back -> [B, T, D]. wo_a's input is not quantised."""
    cfg = run.cfg
    grouped = o.flatten(2).unflatten(2, (cfg.o_groups, -1)).flatten(0, 1).transpose(0, 1)  # [G, N, heads * dim]
    wo_a = run.p[f"{pre}.wo_a.weight"].view(cfg.o_groups, cfg.o_lora_rank, -1)
    r = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
    return run.linear(r, f"{pre}.wo_b").unflatten(0, o.shape[:2])


def moe(run: Pass, pre: str, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """x [N, D], normed -> [N, D] and tokens per expert [E] (spec section 7)."""
    cfg, p = run.cfg, run.p
    scores = F.softplus(x.float() @ p[f"{pre}.gate.weight"].float().T).sqrt()
    ids = (scores + p[f"{pre}.gate.bias"]).topk(k, dim=-1).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * cfg.routed_scaling_factor
    stacks = [p[f"{pre}.experts.{w}"] for w in ("w1", "w3", "w2")]
    routed = run.ops.experts(run.numerics.act(x), ids, weights, stacks, cfg.swiglu_limit, run.numerics.act)
    shared = f"{pre}.shared_experts."
    one = torch.ones(x.shape[0])
    hidden = run.ops.swiglu(run.linear(x, shared + "w1"), run.linear(x, shared + "w3"), one, cfg.swiglu_limit)
    total = routed + run.linear(hidden, shared + "w2")
    return total.to(x.dtype), torch.bincount(ids.flatten(), minlength=scores.shape[1])


def engram(run: Pass, pre: str, x: Tensor, rows: Tensor) -> Tensor:
    """Add each stream's gated memory. x [N, S, D], rows [N, cols] -> [N, S, D] (spec 8.4)."""
    p, s = run.p, run.cfg.hc_mult
    memory = F.embedding(rows, p[f"{pre}.embed.weight"]).flatten(1)
    kv = run.linear(memory, f"{pre}.wkv").unflatten(1, (s + 1, -1))
    return run.ops.gate(x, kv, p[f"{pre}.q_weight"], p[f"{pre}.k_weight"], run.cfg.rms_norm_eps)
