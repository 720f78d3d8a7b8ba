"""Engram's constants against the official code's tables and the release's published figures."""

import json
from pathlib import Path

import pytest

from model import engram_tables
from serve.text import normalise

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(params=["tiny_batch", "tiny_dspark"])
def golden(request):
    folder = GOLDEN / request.param
    text = json.loads((folder / "config.json").read_text())["text_config"]
    return json.loads((folder / "engram_tables.json").read_text()), text


def test_token_map(golden):
    tables, _ = golden
    pieces = tables["pieces_in_id_order"]
    want = tables["token_map"], tables["compressed_vocab_size"]
    assert engram_tables.canonical_map(pieces, pieces, normalise) == want


def test_hash_constants(golden):
    tables, cfg = golden
    n = cfg["engram_max_ngram_size"]
    found = engram_tables.primes(len(cfg["engram_layer_ids"]), cfg["engram_vocab_size"], n, cfg["engram_n_heads"])
    assert found == tables["primes"]
    assert [engram_tables.table_rows(t) for t in found] == cfg["engram_num_embeddings"]
    size = tables["compressed_vocab_size"]
    assert [engram_tables.multipliers(i, size, n) for i in cfg["engram_layer_ids"]] == tables["multipliers"]


def test_release_multipliers():
    assert engram_tables.multipliers(1, 99092, 4) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert engram_tables.multipliers(14, 99092, 4) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_release_tables():
    first, second = engram_tables.primes(2, 16_000_000, 4, 8)
    assert (first[0][0], first[-1][-1], engram_tables.table_rows(first)) == (16000057, 16000463, 384006168)
    assert (second[0][0], second[-1][-1], engram_tables.table_rows(second)) == (16000477, 16000889, 384016682)


def test_offsets_follow_the_column_order():
    assert engram_tables.offsets([[3, 5], [7, 11]]) == [0, 3, 8, 15]


def test_pieces_and_raw_must_pair_up():
    with pytest.raises(ValueError, match="pair up"):
        engram_tables.canonical_map(["a"], [], normalise)
