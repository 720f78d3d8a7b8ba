"""The model as whole sequences, differentiable: no caches, plain masks. Trains `tiny`, and checks the paged forward.

B sequences, T tokens each, N = B * T rows, D model dim, S streams, H heads, C compressed entries, E experts.
Parameters are a flat dict by release names (spec section 11); a layer's experts are one tensor [E, out, in].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from model import dense_ops
from model.config import ModelConfig
from model.engram_tables import multipliers, offsets, primes

Params = Mapping[str, Tensor]


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Numerics:
    """The fake quantisers of spec 2.5; the identity unless the released numerics are wanted."""

    act: Callable[[Tensor], Tensor] = _same  # FP8 groups of 32: linear inputs, window keys
    latent: Callable[[Tensor], Tensor] = _same  # FP4 groups of 16: compressed keys
    index: Callable[[Tensor], Tensor] = _same  # MXFP4 groups of 32: index queries and keys


@dataclass(frozen=True)
class Ops:
    """The functions that cost time; a trainer may put faster equals in their place."""

    mix: Callable = dense_ops.mix
    collapse: Callable = dense_ops.collapse
    post: Callable = dense_ops.post
    rms: Callable = dense_ops.rms
    rope: Callable = dense_ops.rope
    attend: Callable = dense_ops.attend
    swiglu: Callable = dense_ops.swiglu
    gate: Callable = dense_ops.engram_gate
    experts: Callable = dense_ops.experts


@dataclass
class Trace:
    """What a forward leaves for those who train: by layer number unless said otherwise."""

    taps: list[Tensor] = field(default_factory=list)  # [B, T, D] inputs of dspark_target_layer_ids
    loads: dict[int, Tensor] = field(default_factory=dict)  # [E] tokens per expert
    scores: dict[int, Tensor] = field(default_factory=dict)  # [B, T, C] index scores before any mask
    targets: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # queries, keys of each reading layer


@dataclass
class Shared:
    """What layers hand to later layers: compressed keys, index keys, the selection, candidate blocks."""

    latent: Tensor | None = None  # [B, C, head_dim]
    index_keys: Tensor | None = None  # [B, C, index_head_dim]
    selection: Tensor | None = None  # [B or 1, T, C] bool
    candidates: Tensor | None = None  # [B, T, C] bool


@dataclass(frozen=True)
class Pass:
    """One forward's settings. ``select`` off attends to every reachable entry (early training only)."""

    cfg: ModelConfig
    p: Params
    batch: int
    numerics: Numerics = Numerics()
    ops: Ops = Ops()
    select: bool = True
    train_index: bool = False
    trace: Trace = field(default_factory=Trace)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A quantised linear (FP8 or FP4 in the release): its input is quantised."""
        return F.linear(self.numerics.act(x), self.p[name + ".weight"])

    def rms(self, x: Tensor, name: str) -> Tensor:
        return self.ops.rms(x, self.p[name + ".weight"], self.cfg.rms_norm_eps)


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


def rope_angles(cfg: ModelConfig, positions: Tensor, compressed: bool) -> tuple[Tensor, Tensor]:
    """cos and sin [T, rope/2] in fp32, YaRN where a layer reads compressed KV (spec 5.1)."""
    half = cfg.qk_rope_head_dim // 2
    base = cfg.compress_rope_theta if compressed else cfg.rope_theta
    freqs = base ** -(torch.arange(half, dtype=torch.float32) / half)
    if compressed:
        y = cfg.rope_scaling

        def dim_of(rotations: float) -> float:
            wave = y.original_max_position_embeddings / (2 * math.pi * rotations)
            return cfg.qk_rope_head_dim * math.log(wave) / (2 * math.log(base))

        low = max(math.floor(dim_of(y.beta_fast)), 0)
        high = min(math.ceil(dim_of(y.beta_slow)), cfg.qk_rope_head_dim - 1)
        ramp = ((torch.arange(half) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freqs = freqs / y.factor * ramp + freqs * (1 - ramp)
    angles = positions.float()[:, None] * freqs
    return angles.cos(), angles.sin()


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
    cfg, kind, (b, t, _) = run.cfg, run.cfg.kind(layer), x.shape
    c = shared.index_keys.shape[1]
    reach = reachable(t, c, kind.source_ratio)[None]
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
    top = scores.topk(min(cfg.index_topk, c), dim=-1).indices
    shared.selection = torch.zeros(b, t, c, dtype=torch.bool).scatter_(2, top, True) & reach


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


def candidate_mask(cfg: ModelConfig, scores: Tensor) -> Tensor:
    """Entries in the best blocks, the block of the newest reachable entry always among them. scores [B, T, C]."""
    c, size = scores.shape[2], cfg.candidate_block_size
    blocks = -(-c // size)
    best = F.pad(scores, (0, blocks * size - c), value=-math.inf).unflatten(2, (blocks, size)).amax(-1)
    newest = (scores > -math.inf).sum(-1) - 1
    forced = F.one_hot((newest // size).clamp(min=0), blocks).bool() & (newest >= 0)[..., None]
    best = best.masked_fill(forced, math.inf)
    top = best.topk(min(cfg.candidate_topk_blocks, blocks), dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(2, top.indices, top.values > -math.inf)
    return kept.repeat_interleave(size, dim=2)[..., :c]


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
