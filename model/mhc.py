"""Single-pass mHC (spec section 4): hc streams mixed by coefficients made from the streams themselves.

N rows, C = hc_mult streams, D model dim.
"""

from torch import Tensor

from kernels.mhc import mhc_mix
from model import tree
from model.config import ModelConfig
from model.runtime import Runtime
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


@tree.node
class Mixed:
    """Coefficients of one half-block, fp32."""

    pre: Tensor  # [N, C] collapses the streams for the *next* half-block
    post: Tensor  # [N, C] what each stream takes of the half-block's output
    mixing: Tensor  # [N, C, C] source stream first


def mix(cfg: ModelConfig, rt: Runtime, p: MixParams, x: Tensor) -> Mixed:
    """Coefficients of a half-block from its input streams x [N, C, D]."""
    iters, eps = cfg.hc_sinkhorn_iters, cfg.hc_eps
    return Mixed(*mhc_mix(x, p.fn, p.base, p.scale, iters, eps, cfg.rms_norm_eps, backend=rt.kernels.mhc_mix))
