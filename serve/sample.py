"""Sampling with noise that is a function of (request seed, position): who shares the batch does not matter.

M rows, V vocabulary. A draft and its verification use the same noise at the same position, so that drafted output
equals undrafted output token for token.
"""

import torch
from torch import Tensor

# Odd 64-bit constants of the splitmix64 finaliser (Steele, Lea, Flood 2014), as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [.., V] fp32 of int64 seeds [..] at positions [..]: the position the drawn token will have."""
    row = _mix(_mix(seeds * _GOLDEN) + positions * _GOLDEN)
    word = _mix(row.unsqueeze(-1) + torch.arange(1, vocab + 1, device=seeds.device) * _GOLDEN)
    small = (_shift(word, 24).float() + 0.5) * 2.0**-40  # finest near 0, where the noise is large
    return -torch.log(-torch.log1p(-small.clamp(max=1 - 2.0**-24)))  # float rounds the largest words up to 1


def noise(seeds: Tensor, positions: Tensor, temperature: Tensor, vocab: int) -> Tensor:
    """What to add to scaled logits: Gumbel noise where temperature [..] > 0, zeros where it is 0 (greedy)."""
    if not bool((temperature > 0).any()):
        return torch.zeros(*seeds.shape, vocab)
    return torch.where((temperature > 0).unsqueeze(-1), gumbel(seeds, positions, vocab), 0.0)


def inverse(temperature: Tensor) -> Tensor:
    """1 / temperature, and 1 where it is 0."""
    return torch.where(temperature > 0, 1 / temperature.clamp(min=1e-6), 1.0)


def pick(logits: Tensor, inv_temperature: Tensor, noise: Tensor) -> Tensor:
    """Token of each row: argmax of logits [M, V] / temperature + noise (the Gumbel-max rule). Returns int64 [M].

    Raises ValueError for logits that are not finite: weights or scales of the checkpoint are damaged.
    """
    if not bool(logits.isfinite().all()):
        raise ValueError("the model's logits are not finite: weights or scales of this checkpoint are damaged")
    return (logits * inv_temperature.unsqueeze(-1) + noise).argmax(-1)
