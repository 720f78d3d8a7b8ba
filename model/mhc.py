"""Single-pass mHC (spec section 4): hc streams mixed by coefficients made from the streams themselves.

N rows, C = hc_mult streams, D model dim.
"""

from torch import Tensor

from model import tree
from model.config import ModelConfig
from model.tree import Spec


@tree.node
class MixParams:
    """Rows of ``fn`` and ``base``: C pre-mix, C post-mix, then C x C stream mixing; ``scale`` one value each."""

    fn: Tensor  # [(2 + C) * C, C * D] fp32
    base: Tensor  # [(2 + C) * C] fp32
    scale: Tensor  # [3] fp32


def specs(cfg: ModelConfig) -> MixParams:
    c, d = cfg.hc_mult, cfg.hidden_size
    rows = (2 + c) * c
    return MixParams(
        fn=Spec((rows, c * d), "f32", bare=True, scale=(c * d) ** -0.5),
        base=Spec((rows,), "f32", bare=True, init="zeros"),
        scale=Spec((3,), "f32", bare=True, init="ones"),
    )
