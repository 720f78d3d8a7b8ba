"""Sampling with noise that is a function of (request seed, position): who shares the batch does not matter.

M rows, V vocabulary. A draft and its verification use the same noise at the same position, so that drafted output
equals undrafted output token for token.
"""

from dataclasses import dataclass

import numpy as np
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
        return torch.zeros(*seeds.shape, vocab, device=seeds.device)
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


@dataclass(frozen=True)
class Rule:
    """How each of M rows draws: arrays [M] of the requests they belong to."""

    seeds: np.ndarray
    positions: np.ndarray  # that the drawn token will have
    temperature: np.ndarray  # fp32
    top_p: np.ndarray  # fp32
    top_k: np.ndarray  # 0: all
    banned: np.ndarray  # [M, S] token ids that may not come, -1 none


def draw(logits: Tensor, rule: Rule) -> Tensor:
    """Token of each row of logits [M, V], int64 [M]. A row's token depends on nothing but its logits and its rule."""
    device, vocab = logits.device, logits.shape[-1]
    temperature = torch.from_numpy(rule.temperature).to(device)
    seeds, positions = (torch.from_numpy(a).to(device) for a in (rule.seeds, rule.positions))
    if (rule.banned >= 0).any():
        logits = ban(logits, torch.from_numpy(rule.banned).to(device))
    if (rule.temperature > 0).any() and ((rule.top_p < 1).any() or (rule.top_k > 0).any()):
        top_p, top_k = (torch.from_numpy(a).to(device) for a in (rule.top_p, rule.top_k))
        logits = truncate(logits, inverse(temperature), top_p, top_k)
    return pick(logits, inverse(temperature), noise(seeds, positions, temperature, vocab))


def ban(logits: Tensor, banned: Tensor) -> Tensor:
    """Logits [M, V] with ids banned [M, S] out of reach; -1 bans nothing."""
    least = torch.finfo(logits.dtype).min
    room = torch.cat((logits, logits[:, :1]), 1)  # a place for -1
    return room.scatter(1, torch.where(banned >= 0, banned, logits.shape[1]), least)[:, :-1]


def truncate(logits: Tensor, inv_temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Logits [M, V] with all but the ``top_k`` largest out of reach, then all but the fewest of these whose
    probabilities reach ``top_p``. The best token always stays; among equals the lowest id."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = logits.gather(-1, order)
    rank = torch.arange(logits.shape[1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(-1)
    share = torch.softmax((ranked * inv_temperature.unsqueeze(-1)).masked_fill(rank >= k, float("-inf")), -1)
    before = share.cumsum(-1) - share
    keep = (rank < k) & ((before < top_p.unsqueeze(-1)) | (rank == 0))
    keep = torch.zeros_like(keep).scatter(-1, order, keep)
    return logits.masked_fill(~keep, torch.finfo(logits.dtype).min)


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of logits [M, V]: log-probabilities of ``tokens`` [M], the ``count`` most probable ids, and theirs [M, count]."""
    known = torch.log_softmax(logits.float(), -1)
    best = known.topk(count, -1)
    chosen = known.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen.cpu().numpy(), best.indices.to(torch.int32).cpu().numpy(), best.values.cpu().numpy()
