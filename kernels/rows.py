"""Cache rows: quantising writes, and reads that dequantise.

A `plain` pool is 2-D, [atoms, atom size] of the compute dtype; a row is a whole number of atoms and is addressed by
its first. A `packed` pool is flat bytes; a row is codes at one address and scales at another. Pools are written in
place. A page is `page_stride` units (atoms or bytes) and holds planes, one per source and kind; ``planes`` is
[5] int64: first unit of latent codes, latent scales, index codes, index scales; and rows a page holds.
"""

import torch
from torch import Tensor

from kernels import quant
from kernels.registry import op

ENCODE = {"fp8": quant.encode_fp8, "mxfp4": quant.encode_mxfp4, "nvfp4": quant.encode_nvfp4}
DECODE = {"fp8": quant.decode_fp8, "mxfp4": quant.decode_mxfp4, "nvfp4": quant.decode_nvfp4}
WIDTHS = {"fp8": (1, 32), "mxfp4": (2, 32), "nvfp4": (2, 16)}  # values per code byte, per scale byte


def row_bytes(fmt: str, dim: int) -> tuple[int, int]:
    """Bytes of codes and of scales of one packed row."""
    per_code, per_scale = WIDTHS[fmt]
    return dim // per_code, dim // per_scale


def _no_result(*_: object) -> None:
    return None


@op(opaque=_no_result, mutates=("pool",))
def put_packed(pool: Tensor, codes_at: Tensor, scales_at: Tensor, x: Tensor, fmt: str) -> None:
    """Encode rows x [N, d] and write their bytes at pool[codes_at[n]..], pool[scales_at[n]..]. pool [bytes] uint8."""
    codes, scales = ENCODE[fmt](x)
    pool[codes_at.unsqueeze(-1) + torch.arange(codes.shape[-1], device=pool.device)] = codes
    pool[scales_at.unsqueeze(-1) + torch.arange(scales.shape[-1], device=pool.device)] = scales


def _decoded(pool: Tensor, codes_at: Tensor, scales_at: Tensor, dim: int, fmt: str, dtype: torch.dtype) -> Tensor:
    return pool.new_empty((*codes_at.shape, dim), dtype=dtype)


@op(opaque=_decoded)
def get_packed(pool: Tensor, codes_at: Tensor, scales_at: Tensor, dim: int, fmt: str, dtype: torch.dtype) -> Tensor:
    """Read and decode rows: addresses [..] -> [.., dim] in ``dtype``."""
    codes_width, scales_width = row_bytes(fmt, dim)
    codes = pool[codes_at.unsqueeze(-1) + torch.arange(codes_width, device=pool.device)]
    scales = pool[scales_at.unsqueeze(-1) + torch.arange(scales_width, device=pool.device)]
    return DECODE[fmt](codes, scales, dtype)


def put_plain(pool: Tensor, at: Tensor, x: Tensor) -> None:
    """Write rows x [N, d] at atoms at[n].. of pool [A, a]."""
    atoms = x.shape[-1] // pool.shape[1]
    if atoms == 1:
        pool[at] = x
    else:
        pool[at.unsqueeze(-1) + torch.arange(atoms, device=pool.device)] = x.unflatten(-1, (atoms, -1))


def get_plain(pool: Tensor, at: Tensor, dim: int) -> Tensor:
    """Read rows at atoms at [..] -> [.., dim]."""
    atoms = dim // pool.shape[1]
    return pool[at.unsqueeze(-1) + torch.arange(atoms, device=pool.device)].flatten(-2)


def page_rows(
    slots: Tensor, planes: Tensor, stride: int, dim: int, unit: tuple[int, int], kind: int
) -> tuple[Tensor, Tensor]:
    """Addresses of cache rows by slot (page * rows_per_page + row): first units of codes and of scales."""
    rows = planes[4]
    page, row = slots // rows, slots % rows
    return page * stride + planes[kind] + row * unit[0], page * stride + planes[kind + 1] + row * unit[1]


def _row_unit(pool: Tensor, dim: int, fmt: str) -> tuple[int, int]:
    return row_bytes(fmt, dim) if pool.dtype == torch.uint8 else (dim // pool.shape[1], 0)


def write_rows(pool: Tensor, slots: Tensor, planes: Tensor, stride: int, x: Tensor, fmt: str, kind: int) -> None:
    """Write rows x [N, d] of one source into the global pages; ``kind`` 0 latents, 2 index keys."""
    unit = _row_unit(pool, x.shape[-1], fmt)
    codes, scales = page_rows(slots, planes, stride, x.shape[-1], unit, kind)
    if pool.dtype == torch.uint8:
        put_packed(pool, codes, scales, x, fmt)
    else:
        put_plain(pool, codes, x.to(pool.dtype))


def read_rows(
    pool: Tensor, slots: Tensor, planes: Tensor, stride: int, dim: int, fmt: str, kind: int, dtype: torch.dtype
) -> Tensor:
    """Read rows by slot [..] (valid ones only: clamp before) -> [.., dim]."""
    unit = _row_unit(pool, dim, fmt)
    codes, scales = page_rows(slots, planes, stride, dim, unit, kind)
    if pool.dtype == torch.uint8:
        return get_packed(pool, codes, scales, dim, fmt, dtype)
    return get_plain(pool, codes, dim)


@op
def store_window(ring: Tensor, at: Tensor, x: Tensor, quantise: bool) -> Tensor:
    """Write window rows x [N, hd] to ring rows at [N]; returns them as a reader will see them.

    ring [rows, hd] of x's dtype, or flat bytes with rows of hd codes and hd / 32 scales (spec section 2.5, item 2).
    """
    if ring.dtype == torch.uint8:
        codes, scales = row_bytes("fp8", x.shape[-1])
        put_packed(ring, at * (codes + scales), at * (codes + scales) + codes, x, "fp8")
    seen = quant.fake_fp8(x) if quantise else x
    if ring.dtype != torch.uint8:
        put_plain(ring, at, seen)
    return seen


@op
def store_kv(pool: Tensor, slots: Tensor, planes: Tensor, stride: int, x: Tensor, quantise: bool) -> None:
    """Write compressed latents x [N, hd] (after RoPE) to slots [N] of their source's plane (spec 2.5, item 3)."""
    packed = pool.dtype == torch.uint8
    write_rows(pool, slots, planes, stride, quant.fake_nvfp4(x) if quantise and not packed else x, "nvfp4", 0)


@op
def store_index(pool: Tensor, slots: Tensor, planes: Tensor, stride: int, x: Tensor, quantise: bool) -> None:
    """Write index keys x [N, Di] (after RoPE) to slots [N] of their source's plane (spec section 2.5, item 4)."""
    packed = pool.dtype == torch.uint8
    write_rows(pool, slots, planes, stride, quant.fake_mxfp4(x) if quantise and not packed else x, "mxfp4", 2)


@put_packed.cases
def _put_cases() -> list[tuple]:
    at = torch.tensor([64, 0, 320])
    return [
        (torch.zeros(512, dtype=torch.uint8), at, at + row_bytes(fmt, 64)[0], torch.randn(3, 64).to(t), fmt)
        for fmt, t in (("fp8", torch.bfloat16), ("mxfp4", torch.float32), ("nvfp4", torch.bfloat16))
    ]


@get_packed.cases
def _get_cases() -> list[tuple]:
    pool, at = torch.randint(0, 120, (512,), dtype=torch.uint8), torch.tensor([[64, 0], [320, 64]])
    return [
        (pool, at, at + row_bytes(fmt, 64)[0], 64, fmt, t)
        for fmt, t in (("fp8", torch.bfloat16), ("mxfp4", torch.float32), ("nvfp4", torch.bfloat16))
    ]


def _pages() -> tuple[Tensor, Tensor]:
    """A plain pool of 6 pages of two planes (8 rows of 64, 8 rows of 32), and its plane offsets."""
    return torch.zeros(6 * 24, 32), torch.tensor([0, 0, 16, 16, 8])


@store_window.cases
def _store_window_cases() -> list[tuple]:
    at = torch.tensor([1, 9, 4])
    return [(torch.zeros(10, 64), at, torch.randn(3, 64), q) for q in (False, True)] + [
        (torch.zeros(10 * 66, dtype=torch.uint8), at, torch.randn(3, 64).bfloat16(), True)
    ]


@store_kv.cases
def _store_kv_cases() -> list[tuple]:
    pool, planes = _pages()
    return [(pool.clone(), torch.tensor([8, 17, 47]), planes, 24, torch.randn(3, 64), q) for q in (False, True)]


@store_index.cases
def _store_index_cases() -> list[tuple]:
    pool, planes = _pages()
    return [(pool.clone(), torch.tensor([8, 17, 47]), planes, 24, torch.randn(3, 32), q) for q in (False, True)]
