"""What the fields of a `ModelConfig` must satisfy, each alone and together; every error names field and value."""

from typing import TYPE_CHECKING

from model.engram_tables import primes, table_rows

if TYPE_CHECKING:
    from model.config import ModelConfig

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_TABLE = 2**32  # rows of one Engram table; primes beyond it take long to find


def check(c: "ModelConfig") -> None:
    """Raise ValueError naming the first field that is wrong, its value and what would do."""
    for part in (sizes, layers, engram, drafter):
        part(c)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def sizes(c: "ModelConfig") -> None:
    positive = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups "
        "o_lora_rank sliding_window n_routed_experts num_experts_per_tok moe_intermediate_size hc_mult "
        "hc_sinkhorn_iters max_position_embeddings index_n_heads index_head_dim index_topk"
    )
    for name in positive.split():
        _require(getattr(c, name) >= 1, f"{name} must be >= 1, got {getattr(c, name)}")
    for name in ("hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size", "index_head_dim"):
        value = getattr(c, name)
        _require(value % 32 == 0, f"{name} must be a multiple of 32 (quantisation groups), got {value}")
    for name in (
        "swiglu_limit",
        "routed_scaling_factor",
        "rope_theta",
        "compress_rope_theta",
        "rms_norm_eps",
        "hc_eps",
    ):
        _require(getattr(c, name) > 0, f"{name} must be > 0, got {getattr(c, name)}")
    for name in TOKENS:
        token = getattr(c, name)
        _require(0 <= token < c.vocab_size, f"{name} must be a token id below {c.vocab_size}, got {token}")
    heads, groups = c.num_attention_heads, c.o_groups
    _require(heads % groups == 0, f"num_attention_heads must divide by o_groups, got {heads} and {groups}")
    wide = groups * c.o_lora_rank
    _require(wide % 32 == 0, f"o_groups * o_lora_rank must be a multiple of 32 (quantisation groups), got {wide}")
    rope = c.qk_rope_head_dim
    smaller = min(c.head_dim, c.index_head_dim)
    _require(rope % 2 == 0 and rope <= smaller, f"qk_rope_head_dim must be even and <= {smaller}, got {rope}")
    k, e = c.num_experts_per_tok, c.n_routed_experts
    _require(k <= e, f"num_experts_per_tok must be <= n_routed_experts, got {k} and {e}")


def layers(c: "ModelConfig") -> None:
    stages = c.num_nextn_predict_layers
    _require(stages >= 0, f"num_nextn_predict_layers must be >= 0, got {stages}")
    n, ratios = c.num_hidden_layers, c.compress_ratios
    want = n + c.num_nextn_predict_layers
    _require(
        len(ratios) == want, f"compress_ratios must have {want} entries (layers + DSpark stages), got {len(ratios)}"
    )
    _require(set(ratios) <= {0, 1, 2}, f"compress_ratios must hold 0, 1 or 2, got {sorted(set(ratios))}")
    _require(not any(ratios[n:]), f"compress_ratios of DSpark stages must be 0, got {ratios[n:]}")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, name)
        _require(list(ids) == sorted(set(ids)) and ids != (), f"{name} must be ascending and not empty, got {ids}")
        for s in ids:
            _require(0 <= s < n, f"{name} must lie in 0..{n - 1}, got {s}")
            _require(ratios[s] > 0, f"{name} holds layer {s}, whose compress_ratio is 0")
    for s in c.kv_source_layer_ids:
        _require(s in c.index_source_layer_ids, f"kv source layer {s} must be in index_source_layer_ids")
    for layer in range(n):
        if ratios[layer]:
            sources = [s for s in c.kv_source_layer_ids if s <= layer]
            _require(bool(sources), f"layer {layer} reads compressed KV but no kv_source_layer_id is at or before it")
            got, have = ratios[layer], ratios[sources[-1]]
            _require(got == have, f"compress_ratios[{layer}] = {got} but its kv source {sources[-1]} has {have}")
    cand = c.candidate_source_layer_id
    if cand >= 0:
        known = (
            f"candidate_source_layer_id must be one of kv_source_layer_ids {c.kv_source_layer_ids} or -1, got {cand}"
        )
        _require(cand in c.kv_source_layer_ids, known)
        later = [s for s in c.kv_source_layer_ids if s > cand]
        _require(not later, f"kv sources {later} lie after candidate_source_layer_id {cand}")
        blocks, size = c.candidate_topk_blocks, c.candidate_block_size
        _require(blocks >= 1 and size >= 1, f"candidate_topk_blocks and _block_size must be >= 1, got {blocks}, {size}")


def engram(c: "ModelConfig") -> None:
    ids, rows = c.engram_layer_ids, c.engram_num_embeddings
    _require(len(ids) == len(rows), f"engram_num_embeddings must have one entry per engram layer {ids}, got {rows}")
    _require(list(ids) == sorted(set(ids)), f"engram_layer_ids must be ascending, got {ids}")
    for layer in ids:
        last = c.num_hidden_layers - 1
        _require(0 <= layer <= last, f"engram_layer_ids must lie in 0..{last}, got {layer}")
    if ids:
        _require(min(rows) >= 1, f"engram_num_embeddings must be >= 1, got {rows}")
        _require(c.engram_n_heads >= 1, f"engram_n_heads must be >= 1, got {c.engram_n_heads}")
        start = c.engram_vocab_size
        _require(2 <= start <= MAX_TABLE, f"engram_vocab_size must be in 2..{MAX_TABLE}, got {start}")
        size = c.engram_compressed_vocab_size
        _require(1 <= size <= c.vocab_size, f"engram_compressed_vocab_size must be in 1..{c.vocab_size}, got {size}")
        _require(c.engram_max_ngram_size >= 2, f"engram_max_ngram_size must be >= 2, got {c.engram_max_ngram_size}")
        _require(c.engram_head_dim % 32 == 0, f"engram_head_dim must be a multiple of 32, got {c.engram_head_dim}")
        for layer, table, have in zip(
            ids, primes(len(ids), c.engram_vocab_size, c.engram_max_ngram_size, c.engram_n_heads), rows
        ):
            want = table_rows(table)
            why = f"sum of the primes from engram_vocab_size {c.engram_vocab_size}"
            _require(have == want, f"engram_num_embeddings of layer {layer} must be {want} ({why}), got {have}")
        pad, v = c.engram_pad_token_id, c.vocab_size
        _require(0 <= pad < v, f"engram_pad_token_id must be a token id below {v}, got {pad}")


def drafter(c: "ModelConfig") -> None:
    if c.num_nextn_predict_layers == 0:
        return
    _require(c.dspark_block_size >= 1, f"dspark_block_size must be >= 1, got {c.dspark_block_size}")
    _require(
        c.dspark_block_size <= c.sliding_window,
        f"dspark_block_size must be <= sliding_window, got {c.dspark_block_size}",
    )
    _require(bool(c.dspark_target_layer_ids), "dspark_target_layer_ids must not be empty")
    for layer in c.dspark_target_layer_ids:
        last = c.num_hidden_layers - 1
        _require(0 <= layer <= last, f"dspark_target_layer_ids must lie in 0..{last}, got {layer}")
    _require(c.dspark_markov_rank >= 1, f"dspark_markov_rank must be >= 1, got {c.dspark_markov_rank}")
    noise = c.dspark_noise_token_id
    _require(0 <= noise < c.vocab_size, f"dspark_noise_token_id must be a token id below {c.vocab_size}, got {noise}")
    k, e = c.dspark_num_experts_per_tok, c.dspark_n_routed_experts
    _require(1 <= k <= e, f"dspark_num_experts_per_tok must be in 1..{e}, got {k}")
