"""From settings to live migration of experts: what moves, over what, and the rider of the step agreement."""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from model import moe
from model.cache import Cache
from model.transformer import Model
from parallel import mesh, movers
from parallel.eplb.policy import Slots
from parallel.eplb.settings import Eplb
from parallel.expert import first_plan
from parallel.mesh import Axis, Seat
from parallel.migrate import Experts, Planner, Rebalancer, Rebalancing, shown, staging
from parallel.movers import GlooMover, LinkMover, Mover


def experts_of(model: Model, cache: Cache, how: Eplb) -> dict[str, Experts]:
    """What this rank holds of the target's experts, and of the drafter's where there is one."""
    cfg, ranks = model.cfg, model.rt.ep.size
    parts = {"target": (model.params.layers, cfg.n_routed_experts, 0)}
    if model.params.mtp:
        parts["drafter"] = (model.params.mtp, cfg.dspark_n_routed_experts, cfg.num_hidden_layers)
    out = {}
    for name, (layers, experts, at) in parts.items():
        slots = Slots(experts, ranks, how.spare, how.policy, how.groups, how.nodes)
        tensors = [moe.held(layer.block.ffn) for layer in layers]
        end = at + len(layers)
        out[name] = Experts(tensors, model.places[at:end], cache.load[at:end], slots)
    return out


def mover(held: Experts, group: dist.ProcessGroup, how: Eplb, name: str) -> Mover:
    """The transport of ``parallel.eplb.transport``. ``name``: of this part and rank, unlike any other."""
    rows = held.rows()
    if how.transport == "gloo":
        return GlooMover(group, rows, staging(rows))
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # its INFO lines go to stdout
    from parallel.link import LinkSettings, NixlLink  # loads UCX: only where it is chosen

    link = NixlLink(name, LinkSettings(progress=False))
    meet = lambda about: movers.meet(link, group, about)  # noqa: E731
    return LinkMover(link, group.rank(), group.size(), rows, staging(rows), shown(len(rows), held.slots), meet)


def build_rider(
    model: Model, cache: Cache, how: Eplb, seat: Seat, planner: Callable[[Slots], Planner] | None = None
) -> Rebalancing:
    """Called by all ranks at once. Target and drafter have a group, a thread and a state of their own; ``planner``
    takes the place of the policy."""
    ep: Axis = model.rt.ep
    parts = {}
    for name, held in experts_of(model, cache, how).items():
        group = mesh.own_group(seat, ep, timedelta(seconds=how.timeout_s))
        plan = first_plan(held.slots.experts, how.spare, ep.size).numpy()[None].repeat(len(held.tensors), 0)
        over = mover(held, group, how, f"experts-{name}-{seat.rank}")
        parts[name] = Rebalancer(held, over, plan, how, time.monotonic, planner and planner(held.slots))
    return Rebalancing(parts)
