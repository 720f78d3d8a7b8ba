"""Number formats of V4.1 (spec sections 2.1-2.4): fake quantisers, storage codecs of caches and of weights.

Plain functions of local tensors; each is exact arithmetic, so that ``decode(*encode(x))`` equals ``fake(x)`` bit
for bit, and a dequantised weight is exact in bf16. N rows, K columns, the quantised dim; groups run along K.
"""

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest finite E4M3 value
FP4_MAX = 6.0  # largest E2M1 value
GROUP = 32  # values that share a power-of-two scale; also the side of an fp8 weight block
NVFP4_GROUP = 16  # values that share an E4M3 scale
FP8_FLOOR = 1e-4  # smallest amax of the activation quantiser
MXFP4_FLOOR = 6 * 2.0**-126
NVFP4_FLOOR = 6 * 2.0**-9
WEIGHT_FLOOR = FP8_MAX * 2.0**-100  # smallest amax of an fp8 weight block: keeps the product exact in bf16


# --- scales and grids ---


def pow2ceil(x: Tensor) -> Tensor:
    """The smallest power of two >= x, on the bits: exponent, plus one if any mantissa bit is set (spec 2.1).

    x fp32, positive, normal.
    """
    return ((x.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


def _floor_pow2(x: Tensor) -> Tensor:
    """The largest power of two <= x; x fp32, positive, normal."""
    return (x.view(torch.int32) & -0x800000).view(torch.float32)


def _scale_bytes(scale: Tensor) -> Tensor:
    """UE8M0 bytes (exponent + 127) of powers of two, fp32 -> uint8."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def _from_scale_bytes(scales: Tensor) -> Tensor:
    """Powers of two of UE8M0 bytes 1..254, uint8 -> fp32."""
    return (scales.to(torch.int32) << 23).view(torch.float32)


def _round_e4m3(x: Tensor) -> Tensor:
    """fp32 -> nearest E4M3 value, as fp32; ties to even, saturating."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def _round_e2m1(x: Tensor) -> Tensor:
    """fp32 -> nearest of +-{0, .5, 1, 1.5, 2, 3, 4, 6}; ties to the even code, saturating (spec 2.3)."""
    x = x.clamp(-FP4_MAX, FP4_MAX)
    step = 0.5 * _floor_pow2(x.abs().clamp(min=1.0))  # 0.5 below 2, 1 below 4, else 2
    return torch.round(x / step) * step


def _e2m1_codes(x: Tensor) -> Tensor:
    """E2M1 values fp32 -> codes uint8: 0..7 by magnitude, + 8 if the sign bit is set."""
    mag = x.abs()
    code = torch.minimum(torch.minimum(2 * mag, mag + 2), 0.5 * mag + 4)  # one line for each step of the grid
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def _e2m1_values(codes: Tensor) -> Tensor:
    """Codes uint8 0..15 -> E2M1 values fp32."""
    code = codes.to(torch.int32)
    low = code & 7
    mag = torch.where(low < 2, low * 0.5, ((low << 22) + (126 << 23)).view(torch.float32))
    return torch.where(code >= 8, -mag, mag)


def pack(codes: Tensor) -> Tensor:
    """[.., K] uint8 codes below 16 -> [.., K/2] bytes, the even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """[.., K/2] uint8 bytes -> [.., K] codes; inverse of ``pack``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _e2m1_unpacked(packed: Tensor) -> Tensor:
    """[.., K/2] uint8 bytes -> [.., K] E2M1 values fp32: arithmetic in a fused graph, else a gather, 5 times faster."""
    if torch.compiler.is_compiling():
        return _e2m1_values(unpack(packed))
    pairs = _e2m1_values(unpack(torch.arange(256, dtype=torch.uint8, device=packed.device).unsqueeze(1)))
    return torch.nn.functional.embedding(packed.to(torch.int32), pairs).flatten(-2)


def _grouped(x: Tensor, size: int) -> Tensor:
    """[.., K] -> fp32 [.., K/size, size]."""
    return x.float().unflatten(-1, (-1, size))


def _amax(groups: Tensor, floor: float) -> Tensor:
    return groups.abs().amax(-1, keepdim=True).clamp(min=floor)


# --- one split into (values on the grid, scale) per format; fake and encode both start from it ---


def _split_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., K] -> E4M3 values and power-of-two scales, fp32 [.., K/32, 32] and [.., K/32, 1] (spec 2.2)."""
    groups = _grouped(x, GROUP)
    scale = pow2ceil(_amax(groups, FP8_FLOOR) * (1 / FP8_MAX))
    return _round_e4m3(groups / scale), scale


def _split_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., K] -> E2M1 values and power-of-two scales, fp32 [.., K/32, 32] and [.., K/32, 1] (spec 2.3)."""
    groups = _grouped(x, GROUP)
    scale = pow2ceil(_amax(groups, MXFP4_FLOOR) * (1 / FP4_MAX))
    return _round_e2m1(groups / scale), scale


def _split_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., K] -> E2M1 values and E4M3 scales, fp32 [.., K/16, 16] and [.., K/16, 1] (spec 2.3)."""
    groups = _grouped(x, NVFP4_GROUP)
    scale = _round_e4m3(_amax(groups, NVFP4_FLOOR) / FP4_MAX)
    return _round_e2m1(groups / scale), scale


# --- fake quantisers: the values a cache or a linear sees, in the type of x ---


def fake_fp8(x: Tensor) -> Tensor:
    """[.., K] -> the same shape and type, through FP8 with a power-of-two scale per 32 (spec 2.2)."""
    q, scale = _split_fp8(x)
    return (q * scale).flatten(-2).to(x.dtype)


def fake_mxfp4(x: Tensor) -> Tensor:
    """[.., K] -> the same shape and type, through E2M1 with a power-of-two scale per 32 (spec 2.3)."""
    q, scale = _split_mxfp4(x)
    return (q * scale).flatten(-2).to(x.dtype)


def fake_nvfp4(x: Tensor) -> Tensor:
    """[.., K] -> the same shape and type, through E2M1 with an E4M3 scale per 16 (spec 2.3)."""
    q, scale = _split_nvfp4(x)
    return (q * scale).flatten(-2).to(x.dtype)


# --- storage codecs of cache rows: bytes and back ---


def encode_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., K] -> E4M3 bytes [.., K] and UE8M0 bytes [.., K/32], uint8."""
    q, scale = _split_fp8(x)
    return q.flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8), _scale_bytes(scale).squeeze(-1)


def decode_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of ``encode_fp8``: [.., K] in ``dtype``, equal to ``fake_fp8`` of what was encoded."""
    values = _grouped(codes.view(torch.float8_e4m3fn), GROUP)
    return (values * _from_scale_bytes(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def encode_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., K] -> packed E2M1 bytes [.., K/2] and UE8M0 bytes [.., K/32], uint8."""
    q, scale = _split_mxfp4(x)
    return pack(_e2m1_codes(q.flatten(-2))), _scale_bytes(scale).squeeze(-1)


def decode_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of ``encode_mxfp4``: [.., K] in ``dtype``."""
    values = _grouped(_e2m1_unpacked(codes), GROUP)
    return (values * _from_scale_bytes(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def encode_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., K] -> packed E2M1 bytes [.., K/2] and E4M3 scale bytes [.., K/16], uint8."""
    q, scale = _split_nvfp4(x)
    return pack(_e2m1_codes(q.flatten(-2))), scale.squeeze(-1).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_nvfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of ``encode_nvfp4``: [.., K] in ``dtype``."""
    values = _grouped(_e2m1_unpacked(codes), NVFP4_GROUP)
    return (values * scales.view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2).to(dtype)


# --- weights, as released (spec 2.4 and 11); scales are E8M0 tensors ---


def quantise_fp8_block(w: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [N, K] -> E4M3 [N, K] and E8M0 [ceil(N/32), K/32], a scale per 32 x 32 block."""
    n, k = w.shape
    pad = -n % GROUP
    blocks = torch.nn.functional.pad(w.float(), (0, 0, 0, pad)).reshape(-1, GROUP, k // GROUP, GROUP)
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=WEIGHT_FLOOR)
    scale = pow2ceil(amax * (1 / FP8_MAX))
    q = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).reshape(n + pad, k)
    return q[:n].contiguous(), _e8m0(scale[:, 0, :, 0])


def dequantise_fp8_block(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 [N, K] and E8M0 [ceil(N/32), K/32] -> [N, K], exact in bf16 and fp32."""
    rows = scale.float().repeat_interleave(GROUP, 0)[: weight.shape[0]]
    return (_grouped(weight, GROUP) * rows.unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_fp8_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [.., K] -> E4M3 [.., K] and E8M0 [.., K/32], a scale per 32 of a row (the Engram table)."""
    groups = _grouped(w, GROUP)
    scale = pow2ceil(_amax(groups, WEIGHT_FLOOR) * (1 / FP8_MAX))
    q = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q.flatten(-2), _e8m0(scale.squeeze(-1))


def dequantise_fp8_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of ``quantise_fp8_rows``: [.., K], exact in bf16 and fp32."""
    return (_grouped(weight, GROUP) * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [.., N, K] -> packed E2M1 int8 [.., N, K/2] and E8M0 [.., N, K/32]."""
    codes, scales = encode_mxfp4(w)
    return codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)


def dequantise_fp4(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed int8 [.., N, K/2] and E8M0 [.., N, K/32] -> [.., N, K], exact in bf16 and fp32."""
    values = _grouped(_e2m1_unpacked(weight.view(torch.uint8)), GROUP)
    return (values * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def _e8m0(scale: Tensor) -> Tensor:
    """Powers of two, fp32 -> E8M0 of the same shape."""
    return _scale_bytes(scale).contiguous().view(torch.float8_e8m0fnu)
