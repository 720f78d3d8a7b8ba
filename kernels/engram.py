"""Engram (spec section 8): n-gram hashes, table rows, and their gate into the streams.

N rows, C streams, D model dim, n = max n-gram, M = (n - 1) * heads columns, W row width.
"""

import torch
from torch import Tensor

from kernels import quant
from kernels.registry import op
from kernels.steady import sigmoid


@op
def engram_hash(history: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of each token's n-grams (spec 8.3). history [N, n] compressed ids, newest first; multipliers [n];
    primes, offsets [n - 1, heads]; all int64. Returns [N, M]."""
    mixed = history * multipliers
    running, columns = mixed[:, 0], []
    for i in range(1, history.shape[1]):
        running = running ^ mixed[:, i]
        columns.append(running.unsqueeze(-1) % primes[i - 1] + offsets[i - 1])
    return torch.cat(columns, -1)


def _gathered(table: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    return table.new_empty((ids.shape[0], ids.shape[1] * table.shape[1]), dtype=dtype)


@op(opaque=_gathered)
def engram_gather(table: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the table, dequantised and joined. table [rows, W] e4m3, scale [rows, W / 32] e8m0, ids [N, M].

    Returns [N, M * W] in ``dtype``.
    """
    return quant.dequantise_fp8_rows(table[ids], scale[ids], dtype).flatten(1)


@op
def engram_mix(x: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Gate the value into each stream (spec 8.4). x [N, C, D]; kv [N, (C + 1) * D]: C keys, a value; weights [C, D].

    Returns the new streams in x's dtype; sums in fp32.
    """
    c, d = x.shape[1:]
    key, value = kv[:, : c * d].view(-1, c, d).float(), kv[:, c * d :].float()
    stream = x.float()
    dot = (stream * q_weight.float() * k_weight.float() * key).sum(-1)
    norms = torch.rsqrt(stream.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    score = dot * norms * d**-0.5
    gate = sigmoid(torch.copysign(score.abs().clamp(min=1e-6).sqrt(), score))
    return (stream + gate.unsqueeze(-1) * value.unsqueeze(1)).to(x.dtype)


@engram_hash.cases
def _hash_cases() -> list[tuple]:
    primes = torch.tensor([[31, 37], [41, 43]])
    offsets = torch.tensor([[0, 31], [68, 109]])
    return [
        (torch.randint(0, 64, (n, 3)), torch.tensor([2**55 + 1, 2**54 + 3, 12345]), primes, offsets) for n in (2, 7)
    ]


@engram_gather.cases
def _gather_cases() -> list[tuple]:
    table, scale = quant.quantise_fp8_rows(torch.randn(50, 64))
    return [(table, scale, torch.randint(0, 50, (n, 3)), t) for n in (2, 5) for t in (torch.float32, torch.bfloat16)]


@engram_mix.cases
def _mix_cases() -> list[tuple]:
    x = torch.randn(5, 4, 32)
    return [(x.to(t), torch.randn(5, 160).to(t), torch.rand(4, 32).to(t), torch.rand(4, 32).to(t), 1e-20)
            for t in (torch.float32, torch.bfloat16)]  # fmt: skip
