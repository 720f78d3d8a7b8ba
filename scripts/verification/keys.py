"""Keys of the golden format (tests/data/golden/README.md), and those of a file that no check has read."""

import re

from scripts.verification.case import SequenceSet
from scripts.verification.table import Results

# Seen where ops are recorded; a layer that runs as compiled graphs does not show them.
RECORDED = (
    r"prefill\.layers\.\d+\.(attn_out|ffn_out|latent_pre_rope|index_score|gate_ids|gate_weights|engram_hash_ids)",
    r"decode\.\d+\.layers\.\d+\.(engram_hash_ids|gate_ids|topk_positions)",
    r"decode\.\d+\.spec\.mtp\.(\d+\.gate_ids|0\.out_stream)",
)
ALWAYS = (
    r"prefill\.layers\.\d+\.(out_stream|out_pre_mix|engram_out|topk_positions|candidate_mask)",
    r"prefill\.layers\.\d+\.(compress_kv|index_k|window_kv_ring)",
    r"prefill\.(logits_all|logits_last|main_hidden)",
    r"decode\.\d+\.logits",
    r"decode\.\d+\.spec\.(input_id|output_ids|logits|confidence)",
    r"replay_(after|from)_source\.(logits_last|decode\.\d+\.logits|layers\.\d+\.window_kv_ring)",
)


def due(key: str, recordable: bool) -> bool:
    """Whether a key of a set, its ``seqI.`` taken off, is one that the checks must have read."""
    return any(re.fullmatch(form, key) for form in (*ALWAYS, *(RECORDED if recordable else ())))


def check_keys(st: SequenceSet, recordable: bool, results: Results) -> None:
    """To be called last: no key of the format was left out, and the file had at least one; others are listed."""
    unread = sorted(st.expected.keys() - st.read)
    missed = [key for key in unread if due(key, recordable)]
    if len(unread) == len(st.expected):
        missed = missed or ["no key of the format"]
    where = f"{st.name}.{missed[0]}" if missed else st.name
    results.add("keys left out", "keys", len(missed), 0, where)
    results.unread += [f"{st.name}.{key}" for key in unread]
