"""Elementwise functions whose bits do not depend on where in a tensor a value lies.

torch's own sigmoid and softplus round a tensor's last few values, those that fill no SIMD register, in another way: a
row's bits would depend on how many rows come after it wherever rows are not a multiple of 32 values (odd numbers of
streams or experts). Its exp and log1p do not.
"""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), and x itself above 20, as torch has it."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
