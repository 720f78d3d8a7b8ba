"""What one forward of model/dense.py is given and what it leaves: parameters, quantisers, ops, a trace.

B sequences, T tokens each, D model dim, C compressed entries, E experts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from model import dense_ops
from model.config import ModelConfig

Params = Mapping[str, Tensor]


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Numerics:
    """The fake quantisers of spec 2.5; the identity unless the released numerics are wanted."""

    act: Callable[[Tensor], Tensor] = _same  # FP8 groups of 32: linear inputs, window keys
    latent: Callable[[Tensor], Tensor] = _same  # FP4 groups of 16: compressed keys
    index: Callable[[Tensor], Tensor] = _same  # MXFP4 groups of 32: index queries and keys


@dataclass(frozen=True)
class Ops:
    """The functions that cost time; a trainer may put faster equals in their place."""

    mix: Callable = dense_ops.mix
    collapse: Callable = dense_ops.collapse
    post: Callable = dense_ops.post
    rms: Callable = dense_ops.rms
    rope: Callable = dense_ops.rope
    attend: Callable = dense_ops.attend
    swiglu: Callable = dense_ops.swiglu
    gate: Callable = dense_ops.engram_gate
    experts: Callable = dense_ops.experts


@dataclass
class Trace:
    """What a forward leaves for those who train: by layer number unless said otherwise."""

    taps: list[Tensor] = field(default_factory=list)  # [B, T, D] inputs of dspark_target_layer_ids
    loads: dict[int, Tensor] = field(default_factory=dict)  # [E] tokens per expert
    scores: dict[int, Tensor] = field(default_factory=dict)  # [B, T, C] index scores before any mask
    targets: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # queries, keys of each reading layer


@dataclass
class Shared:
    """What layers hand to later layers: compressed keys, index keys, the selection, candidate blocks."""

    latent: Tensor | None = None  # [B, C, head_dim]
    index_keys: Tensor | None = None  # [B, C, index_head_dim]
    selection: Tensor | None = None  # [B or 1, T, C] bool
    candidates: Tensor | None = None  # [B, T, C] bool


@dataclass(frozen=True)
class Pass:
    """One forward's settings. ``select`` off attends to every reachable entry (early training only)."""

    cfg: ModelConfig
    p: Params
    batch: int
    numerics: Numerics = Numerics()
    ops: Ops = Ops()
    select: bool = True
    train_index: bool = False
    trace: Trace = field(default_factory=Trace)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A quantised linear (FP8 or FP4 in the release): its input is quantised."""
        return F.linear(self.numerics.act(x), self.p[name + ".weight"])

    def rms(self, x: Tensor, name: str) -> Tensor:
        return self.ops.rms(x, self.p[name + ".weight"], self.cfg.rms_norm_eps)
