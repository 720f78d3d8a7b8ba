"""Training steps of the DSpark drafter on a frozen backbone.

B sequences, T tokens, M anchors of each, K = dspark_block_size, V vocabulary.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import dense, dense_dspark
from model.dense import Params
from scripts.training.backbone import Setup, is_drafter, working_copy

LATER = 0.8  # weight of a row against the one before: a draft counts only if all before it were right
CONFIDENCE = 0.1  # weight of the confidence loss; it reads the drafter's rows and does not shape them


def drafter_names(params: Params) -> list[str]:
    return [n for n in params if is_drafter(n) and not n.endswith("gate.bias")]


def step_drafter(
    setup: Setup, params: Params, batch: Tensor, anchors: int, seed: tuple[int, ...]
) -> tuple[dict[str, float], dict[str, Tensor], dict[int, Tensor]]:
    """batch [B, T + 1] -> (losses and the acceptance length of the batch, gradients, tokens per expert by stage)."""
    cfg, ids = setup.cfg, batch[:, :-1]
    leaves, working = working_copy(setup, params, drafter_names(params))
    run = dense.Pass(cfg, working, ids.shape[0], setup.numerics, setup.ops, trace=dense.Trace())
    with torch.no_grad():
        hidden = dense.forward(run, ids, dense.hash_rows(cfg, setup.tables, ids))
    last = pick(ids.shape, cfg.dspark_block_size, anchors, seed)
    y, loads = dense_dspark.draft(run, dense_dspark.context(run, run.trace.taps), batch.gather(1, last + 1), last)
    steps = last[..., None] + 1 + torch.arange(cfg.dspark_block_size)  # [B, M, K]: row i follows token last + 1 + i
    previous = batch.gather(1, steps.flatten(1)).view(steps.shape)
    with torch.no_grad():
        seen = hidden.gather(1, steps.flatten(1)[..., None].expand(-1, -1, hidden.shape[2])).view(*steps.shape, -1)
        goal = F.linear(seen, working["head.weight"]).float()
    guess = dense_dspark.logits(run, y, previous)
    right = guess.argmax(-1) == goal.argmax(-1)
    doubt = dense_dspark.confidence(run, y.detach(), previous)
    weights = LATER ** torch.arange(cfg.dspark_block_size)
    each = -(goal.softmax(-1) * guess.log_softmax(-1)).sum(-1)
    loss = (each * weights).mean() / weights.mean()
    sure = F.binary_cross_entropy_with_logits(doubt, right.float())
    grads = torch.autograd.grad(loss + CONFIDENCE * sure, list(leaves.values()))
    metrics = {
        "draft_loss": loss.item(),
        "confidence_loss": sure.item(),
        "first": right[..., 0].float().mean().item(),
        "acceptance": 1 + right.float().cumprod(-1).sum(-1).mean().item(),
    }
    return metrics, dict(zip(leaves, grads, strict=True)), dict(enumerate(loads))


def pick(shape: tuple[int, int], size: int, anchors: int, seed: tuple[int, ...]) -> Tensor:
    """Last context positions [B, M], drawn apart in each sequence so that a whole block still has its answers."""
    room = shape[1] - size
    if anchors > room:
        raise ValueError(f"anchors must be <= {room} for sequences of {shape[1]} tokens, got {anchors}")
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([rng.choice(room, anchors, replace=False) for _ in range(shape[0])]))
