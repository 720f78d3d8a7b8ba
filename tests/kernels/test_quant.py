"""Number formats: grids, ties, saturation, and codes against the fake quantisers."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from kernels import quant

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
CODECS = {
    "fp8": (quant.fake_fp8, quant.encode_fp8, quant.decode_fp8),
    "mxfp4": (quant.fake_mxfp4, quant.encode_mxfp4, quant.decode_mxfp4),
    "nvfp4": (quant.fake_nvfp4, quant.encode_nvfp4, quant.decode_nvfp4),
}
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


def samples(dtype: torch.dtype) -> Tensor:
    """[64, 3, 96] values over many magnitudes, with zeros, negative zeros and whole zero groups."""
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(64, 3, 96, generator=gen) * torch.exp2(torch.randint(-20, 7, (64, 3, 1), generator=gen))
    x[0, 0, :32] = 0.0
    x[1, :, ::5] = -0.0
    x[2, :, 3] = 1e-30
    return x.to(dtype)


def mx_row(values: list[float]) -> Tensor:
    """One group of 32 whose MXFP4 scale is 1 (amax 6), padded with zeros."""
    return torch.tensor(values + [6.0] + [0.0] * (31 - len(values)))


def test_pow2ceil():
    got = quant.pow2ceil(torch.tensor([1.0, 1.0000001, 1.5, 2.0, 2.0**-126, 3e-5, 0.7]))
    want = [1.0, 2.0, 2.0, 2.0, 2.0**-126, 2.0**-15, 1.0]
    assert got.tolist() == want


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_e2m1_ties_go_to_the_even_code(sign: float):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    got = quant.fake_mxfp4(sign * mx_row(ties))[:7]
    assert got.tolist() == [sign * w for w in want]


def test_e2m1_rounds_to_nearest_beside_ties():
    mids = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below, above = mids * (1 - 1e-6), mids * (1 + 1e-6)
    assert quant.fake_mxfp4(mx_row(below.tolist()))[:7].tolist() == GRID[:-1]
    assert quant.fake_mxfp4(mx_row(above.tolist()))[:7].tolist() == GRID[1:]


def test_scale_is_a_power_of_two_at_least_amax_over_max():
    x = samples(torch.float32)
    for encode, top, floor in ((quant.encode_fp8, 448, 1e-4), (quant.encode_mxfp4, 6, 6 * 2.0**-126)):
        _, scales = encode(x)
        s = torch.exp2(scales.double() - 127)
        amax = x.double().unflatten(-1, (-1, 32)).abs().amax(-1).clamp(min=floor)
        assert (s * top * (1 + 1e-6) >= amax).all() and (s * top < 2 * amax * (1 + 1e-6)).all()


def test_nvfp4_scale_can_round_down_and_saturates():
    x = torch.full((16,), 6 * 1.06)  # amax / 6 = 1.06 -> 1.0 in E4M3
    assert quant.fake_nvfp4(x).tolist() == [6.0] * 16
    assert quant.fake_nvfp4(torch.full((16,), 1e9)).tolist() == [6.0 * 448] * 16


def test_zero_groups_stay_zero_and_keep_their_sign():
    x = torch.zeros(2, 32)
    x[1] = -0.0
    for fake, _, _ in CODECS.values():
        y = fake(x)
        assert (y == 0).all() and not y[0].signbit().any() and y[1].signbit().all()


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_decode_of_encode_is_fake(name: str, dtype: torch.dtype):
    fake, encode, decode = CODECS[name]
    x = samples(dtype)
    codes, scales = encode(x)
    per, group = (1, 32) if name == "fp8" else (2, 16 if name == "nvfp4" else 32)
    assert codes.dtype == scales.dtype == torch.uint8
    assert codes.shape == (64, 3, 96 // per) and scales.shape == (64, 3, 96 // group)
    assert same_bits(decode(codes, scales, dtype), fake(x))


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])  # nvfp4 scales round, so it is not idempotent
def test_idempotent(name: str, dtype: torch.dtype):
    once = CODECS[name][0](samples(dtype))
    assert same_bits(CODECS[name][0](once), once)


def test_every_code_survives():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]  # 0x7F and 0xFF are E4M3's NaNs
    values = finite.view(torch.float8_e4m3fn).float()
    rows = torch.cat((values[:, None], torch.full((len(values), 1), 448.0).expand(-1, 31)), 1)
    got, scales = quant.encode_fp8(rows)
    assert torch.equal(got[:, 0], finite) and (scales == 127).all()
    packed = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    rows = torch.cat((packed, torch.full((256, 15), 0x77, dtype=torch.uint8)), 1)  # 0x77 = two sixes: scale 1
    one = torch.full((256, 1), 127, dtype=torch.uint8)
    got, scales = quant.encode_mxfp4(quant.decode_mxfp4(rows, one, torch.bfloat16))
    assert torch.equal(got, rows) and torch.equal(scales, one)


def test_nibble_order_and_values():
    row = torch.tensor([[0x10 * hi + lo for lo, hi in zip(range(0, 16, 2), range(1, 16, 2), strict=True)] * 2])
    got = quant.decode_mxfp4(row.to(torch.uint8), torch.tensor([[128]], dtype=torch.uint8), torch.float32)
    signed = [2 * v for v in GRID] + [-2 * v for v in GRID]
    assert got[0].tolist() == signed * 2
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(quant.unpack(quant.pack(codes)), codes)


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_traces_whole_with_dynamic_rows(name: str):
    fake = CODECS[name][0]
    compiled = torch.compile(fake, fullgraph=True, dynamic=True)
    for n in (64, 5):
        x = samples(torch.bfloat16)[:n]
        assert same_bits(compiled(x), fake(x))


@pytest.mark.slow
def test_unpacking_in_a_graph_equals_unpacking_by_gather():
    compiled = torch.compile(quant.decode_mxfp4, fullgraph=True, dynamic=True)
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(120, 136, dtype=torch.uint8).view(16, 1)
    for dtype in BITS:
        assert same_bits(compiled(codes, scales, dtype), quant.decode_mxfp4(codes, scales, dtype))


WEIGHTS = {
    "block": (quant.quantise_fp8_block, quant.dequantise_fp8_block, 2**-4),
    "rows": (quant.quantise_fp8_rows, quant.dequantise_fp8_rows, 2**-4),
    "fp4": (quant.quantise_fp4, quant.dequantise_fp4, 2**-2),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_round_once_and_are_exact_in_bf16(name: str):
    quantise, dequantise, step = WEIGHTS[name]
    w = samples(torch.float32).reshape(-1, 96)[:70]
    once = dequantise(*quantise(w), torch.float32)
    assert torch.equal(dequantise(*quantise(w), torch.bfloat16).float(), once)
    assert torch.equal(dequantise(*quantise(once), torch.float32), once)
    groups = w.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    limit = (2 * groups if name == "block" else groups).expand(-1, -1, 32).flatten(-2)
    if name == "block":
        limit = limit.new_full(limit.shape, w.abs().max().item())
    assert ((once - w).abs() <= step * limit).all()


def test_block_scales_cover_ragged_rows_and_never_overflow():
    w = torch.zeros(33, 64)
    w[32, 40] = 3e38
    w[0, 0] = 449.0
    weight, scale = quant.quantise_fp8_block(w)
    assert weight.shape == (33, 64) and scale.shape == (2, 2)
    assert weight.float().isfinite().all() and weight.float().abs().max() <= 448
    assert scale.float()[0, 0] == 2.0  # 449 does not fit under scale 1


def test_golden_weights_dequantise_by_the_hand_formula():
    with safe_open(GOLDEN / "tiny_dspark" / "weights.safetensors", "pt") as f:
        weight, scale = (f.get_tensor(f"layers.0.attn.wq_a.{part}") for part in ("weight", "scale"))
        got = quant.dequantise_fp8_block(weight, scale, torch.bfloat16)
        for n, k in ((0, 0), (1, 33), (weight.shape[0] - 1, weight.shape[1] - 1)):
            exponent = int(scale.view(torch.uint8)[n // 32, k // 32]) - 127
            assert got[n, k].item() == weight[n, k].float().item() * 2.0**exponent
        weight, scale = (f.get_tensor(f"layers.0.ffn.experts.0.w1.{part}") for part in ("weight", "scale"))
        got = quant.dequantise_fp4(weight, scale, torch.bfloat16)
        for n, k in ((0, 0), (0, 1), (5, 33), (weight.shape[0] - 1, 2 * weight.shape[1] - 1)):
            code = (int(weight.view(torch.uint8)[n, k // 2]) >> (4 * (k % 2))) & 15
            exponent = int(scale.view(torch.uint8)[n, k // 32]) - 127
            assert got[n, k].item() == math.copysign(GRID[code & 7], 7.5 - code) * 2.0**exponent
