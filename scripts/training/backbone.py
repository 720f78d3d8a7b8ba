"""Training steps of the backbone and of its indexers.

B sequences, T tokens, C compressed entries, E experts. Parameters are fp32 masters by release names; each step works on
a bf16 copy of the matrices.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from model import dense, dense_index
from model.config import ModelConfig
from model.dense import HashTables, Numerics, Ops, Params

# Small or delicate parameters stay fp32 in the forward pass.
FP32 = ("norm.weight", "attn_sink", "gate.bias", "gate.weight", "_fn", "_base", "_scale", "q_weight", "k_weight")
INDEX_QUERIES = 256  # query rows of each sequence that teach the indexer in a step


@dataclass(frozen=True)
class Setup:
    """What every phase needs: geometry, Engram constants, the functions to run, the loss of the head."""

    cfg: ModelConfig
    tables: HashTables
    ops: Ops
    head_loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    numerics: Numerics = field(default_factory=Numerics)
    weights: Callable[[str, Tensor], Tensor] | None = None  # rounds a parameter as it will be stored


def head_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats. hidden [N, D], head [V, D], targets [N]."""
    return F.cross_entropy(F.linear(hidden, head).float(), targets)


def is_drafter(name: str) -> bool:
    return name.startswith("mtp.")


def is_index(name: str) -> bool:
    return ".indexer." in name


def backbone_names(params: Params) -> list[str]:
    """Trained by the language loss: all but the drafter, the indexers and the balancing biases."""
    return [n for n in params if not (is_drafter(n) or is_index(n) or n.endswith("gate.bias"))]


def index_names(params: Params) -> list[str]:
    return [n for n in params if is_index(n)]


def working_copy(setup: Setup, params: Params, trained: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(leaves that collect gradients, all parameters in the types of the forward pass)."""
    leaves = {n: params[n].detach().requires_grad_() for n in trained}
    full = {n: leaves.get(n, p) for n, p in params.items()}
    if setup.weights is not None:
        full = {n: setup.weights(n, p) for n, p in full.items()}
    return leaves, {n: p if n.endswith(FP32) else p.bfloat16() for n, p in full.items()}


def step_backbone(
    setup: Setup, params: Params, batch: Tensor, select: bool, with_index: bool
) -> tuple[dict[str, float], dict[str, Tensor], dict[int, Tensor]]:
    """batch [B, T + 1] -> (losses, gradients by name, tokens per expert by layer).

    ``select`` puts the top-k selection in force; ``with_index`` adds the indexers' loss, which touches only them.
    """
    names = backbone_names(params) + (index_names(params) if with_index else [])
    leaves, working = working_copy(setup, params, names)
    run, hidden = _forward(setup, working, batch[:, :-1], select, with_index)
    loss = setup.head_loss(hidden.flatten(0, 1), working["head.weight"], batch[:, 1:].flatten())
    metrics = {"loss": loss.item()}
    if with_index:
        extra = index_loss(setup.cfg, run)
        metrics["index_loss"] = extra.item()
        loss = loss + extra
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return metrics, dict(zip(leaves, grads, strict=True)), run.trace.loads


def step_index(setup: Setup, params: Params, batch: Tensor) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The indexers alone, on a frozen backbone that attends to everything."""
    leaves, working = working_copy(setup, params, index_names(params))
    run, _ = _forward(setup, working, batch[:, :-1], False, True, last=max(setup.cfg.index_source_layer_ids))
    loss = index_loss(setup.cfg, run)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"index_loss": loss.item()}, dict(zip(leaves, grads, strict=True))


def _forward(setup: Setup, working: Params, ids: Tensor, select: bool, with_index: bool, last: int | None = None):
    run = dense.Pass(setup.cfg, working, ids.shape[0], setup.numerics, setup.ops, select, with_index, dense.Trace())
    return run, dense.forward(run, ids, dense.hash_rows(setup.cfg, setup.tables, ids), last)


def index_loss(cfg: ModelConfig, run: dense.Pass) -> Tensor:
    """How far each indexer is from the attention its selection serves: KL to the probabilities over compressed entries,
    summed over heads and over the layers that use the selection, at evenly spaced queries. Mean over indexers."""
    losses = []
    for layer, scores in run.trace.scores.items():
        t, c = scores.shape[1:]
        ratio = cfg.kind(layer).source_ratio
        every = max(t // INDEX_QUERIES, 1)
        rows = torch.arange(every - 1, t, every)
        reach = dense_index.reachable(t, c, ratio)[rows]
        rows, reach = rows[reach.any(-1)], reach[reach.any(-1)]
        with torch.no_grad():
            goal = sum(_attention(*run.trace.targets[user], rows, reach) for user in users(cfg, layer))
            goal = goal / goal.sum(-1, keepdim=True)
        guess = scores[:, rows].float().masked_fill(~reach, -1e30).log_softmax(-1)
        losses.append((torch.xlogy(goal, goal) - goal * guess.masked_fill(~reach, 0)).sum(-1).mean())
    return torch.stack(losses).mean()


def users(cfg: ModelConfig, layer: int) -> list[int]:
    """The layers that attend to what ``layer`` selects: itself and those up to the next selection."""
    later = [i for i in cfg.index_source_layer_ids if i > layer]
    return [i for i in range(layer, min(later, default=cfg.num_hidden_layers)) if cfg.kind(i).reads]


def _attention(q: Tensor, keys: Tensor, rows: Tensor, reach: Tensor) -> Tensor:
    """Probabilities over compressed entries alone, summed over heads: q [B, T, H, d], keys [B, C, d] -> [B, R, C]."""
    picked = q[:, rows].transpose(1, 2)  # [B, H, R, d]
    z = (picked @ keys[:, None].transpose(2, 3)).float() / math.sqrt(q.shape[-1])
    return z.masked_fill_(~reach, -1e30).softmax(-1).sum(1)


@torch.no_grad()
def balance(params: Params, loads: dict[int, Tensor], rate: float, prefix: str = "layers") -> None:
    """Nudge each expert's bias towards an even load, in place (auxiliary-loss-free balancing)."""
    for layer, load in loads.items():
        load = load.float()
        params[f"{prefix}.{layer}.ffn.gate.bias"].add_((load.mean() - load).sign(), alpha=rate)


def schedule(step: int, total: int, warmup: int, decay: float) -> float:
    """Rate factor: linear warm-up, flat, then linear to zero over the last ``decay`` of the steps."""
    return min(1.0, (step + 1) / warmup, (total - step) / max(decay * total, 1))
