"""RoPE frequencies and hash constants against the release's published figures; configs that contradict them."""

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from model import constants
from model.batch import rope
from model.config import ModelConfig
from scripts.build import ROOT, build_model_config
from tests.small import config


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    return build_model_config(OmegaConf.load(ROOT / "conf" / "model" / "flash.yaml"))


def test_plain_frequencies(flash):
    want = torch.tensor([10000.0 ** (-2 * i / 64) for i in range(32)])
    torch.testing.assert_close(constants.window_freqs(flash), want)


def test_yarn_of_flash_ramps_from_15_to_25(flash):
    base = torch.tensor([160000.0 ** (-2 * i / 64) for i in range(32)])
    ratio = constants.compress_freqs(flash) / base
    ramp = (1 - ratio) / (1 - 1 / 16)
    want = torch.tensor([min(max((i - 15) / 10, 0), 1) for i in range(32)])
    torch.testing.assert_close(ramp, want, rtol=0, atol=1e-5)


def test_angles_are_fp32_products(flash):
    """At 1M the rounding shows, and is the release's own."""
    freqs = constants.window_freqs(flash)
    cos, sin = rope(torch.tensor([1_000_003]), freqs)
    angle = torch.tensor(1_000_003.0) * freqs
    assert torch.equal(cos[0], angle.cos()) and torch.equal(sin[0], angle.sin())


def test_hash_tables_of_flash(flash):
    """The sums of the primes are the sizes of the released tables, or this raises."""
    first, second = constants.hashes(flash)
    assert first.primes.shape == (3, 8) and first.offsets[0, 0] == 0
    assert (int(first.primes[0, 0]), int(first.primes[-1, -1])) == (16000057, 16000463)
    assert (int(second.primes[0, 0]), int(second.primes[-1, -1])) == (16000477, 16000889)
    assert int(second.offsets[-1, -1] + second.primes[-1, -1]) == 384016682
    assert first.multipliers.tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]


def test_table_of_the_wrong_size():
    cfg = config()
    rows = cfg.engram_num_embeddings
    with pytest.raises(ValueError, match=f"engram_num_embeddings of layer 3 must be {rows[1]} .* got {rows[1] + 1}"):
        replace(cfg, engram_num_embeddings=(rows[0], rows[1] + 1))


def test_token_map():
    cfg = config()
    assert constants.constants(cfg).token_map.tolist() == [i % 80 for i in range(96)]
    assert constants.constants(cfg, [7] * 96).token_map.tolist() == [7] * 96
    with pytest.raises(ValueError, match="tokenizer has 95 tokens, vocab_size is 96"):
        constants.constants(cfg, [0] * 95)
    with pytest.raises(ValueError, match="engram_compressed_vocab_size is 80, the tokenizer's map has 81 ids"):
        constants.constants(cfg, [80] * 96)
