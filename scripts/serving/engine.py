"""From settings to an engine: the policy's file, limits of model and cache, and the loop over real ports."""

import importlib
import inspect
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from model.transformer import Model
from parallel import mesh, migrate
from parallel.eplb.policy import Slots
from parallel.mesh import ALONE, Axis, Seat
from parallel.migrate import Planner
from parallel.plan import Plan
from scripts.build import Settings, build_device, build_model
from scripts.bytetext import ByteText
from scripts.rebalancing import build_rider
from scripts.serving.handing import Ties, build_ties, exchange_on
from serve import capture
from serve.engine import Engine, Mail
from serve.launch import StepRunner
from serve.lockstep import WIDTH, Lockstep, Unpaced, bucket, ragged
from serve.request import Ask, Sampling
from serve.runner import Runner
from serve.schedule.scheduler import Scheduler
from serve.schedule.sequence import Sequence
from serve.settings import Limits, Policy, Serve
from serve.text import Text


def build_policy(policy: Policy) -> Callable:
    """The `key` of serve/schedule/policies/NAME.py with the YAML's options. Raises ValueError if there is none, or for
    an option that it does not take."""
    name = f"serve.schedule.policies.{policy.name}"
    try:
        key = importlib.import_module(name).key
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"serve.policy.name={policy.name}: serve/schedule/policies/{policy.name}.py must be there and define `key` "
            f"({error})"
        ) from None
    takes = list(inspect.signature(key).parameters)[2:]  # after the sequence and `cached`
    for option in policy.options:
        if option not in takes:
            known = ", ".join(takes) or "none"
            raise ValueError(f"unknown key serve.policy.options.{option}; {policy.name} takes: {known}")
    made = partial(key, **policy.options)
    trial = Sequence(Ask(1, np.zeros(3, np.int32), [], Sampling(1)), 1, 0)
    try:  # rather here than at the first request
        (*made(trial, lambda: 0),) < (*made(trial, lambda: 1),)  # noqa: B015
    except Exception as error:
        raise ValueError(
            f"serve.policy: {policy.name} with serve.policy.options {dict(policy.options)} does not order requests: "
            f"{type(error).__name__}: {error}"
        ) from None
    return made


def limits(serve: Serve, model: Model, speculate: bool) -> Limits:
    """What model and settings allow. Raises ValueError for a block longer than the drafter's, or no drafter."""
    cfg, block = model.cfg, serve.speculation.block
    if speculate and not model.params.mtp:
        raise ValueError("speculate=true needs a drafter; this model has none (num_nextn_predict_layers is 0)")
    if block is not None and block > cfg.dspark_block_size:
        raise ValueError(f"serve.speculation.block must be <= the drafter's {cfg.dspark_block_size}, got {block}")
    drafts = (block or cfg.dspark_block_size) if speculate else 0
    context = min(cfg.max_position_embeddings, serve.pages * serve.page_size)
    return Limits(serve, context, cfg.sliding_window, cfg.num_hidden_layers, drafts)


def runner_of(model: Model, serve: Serve, device: torch.device | str = "cpu") -> Runner:
    """A runner with a cache as large as the engine's; number 0 of pages and slots is scratch. Raises ValueError for
    steps to record that cannot be."""
    recorder = capture.recorder(device) if serve.capture.buckets else None
    runner = Runner(model, serve.pages + 1, serve.slots + 1, device, serve.prefill)
    if recorder is not None:
        runner.record(recorder, serve.capture.buckets)
    return runner


def engine_on(
    runner: Runner, serve: Serve, speculate: bool, mail: Mail, lockstep: Unpaced | Lockstep | None = None,
    now: Callable[[], float] = time.monotonic, ties: Ties | None = None,
) -> Engine:  # fmt: skip
    """An engine that has ``runner`` to itself, alone or in step with its peers; with ``ties`` to others it hands
    requests over by the rules of ``serve.handoff``. ``now``: seconds of its clock."""
    scheduler = Scheduler(limits(serve, runner.model, speculate), build_policy(serve.policy))
    device = StepRunner(runner, serve, now)
    exchange = None if ties is None else exchange_on(scheduler, runner, ties, serve.handoff, now)
    return Engine(scheduler, device, mail, now, lockstep, exchange)


def row_width(plan: Plan) -> int:
    """Words of the rows by which the plan's ranks agree on a step."""
    return WIDTH + (migrate.WIDTH if plan.eplb.enabled else 0)


def build_engine(
    s: Settings, mail: Mail, seat: Seat = ALONE, planner: Callable[[Slots], Planner] | None = None
) -> tuple[Engine, Text | ByteText]:
    """The engine of the settings at one seat of the plan, and its tokenizer. Joins the other ranks, if there are any.
    ``planner`` places experts instead of the policy (scripts/rebalancing.py).

    Raises ValueError for a plan of several ranks without seats for them.
    """
    if s.parallel.world != seat.size:
        raise ValueError(
            f"parallel: the plan has {s.parallel.world} ranks, and this script starts {seat.size}: use scripts.server, "
            "scripts.run target=http://..., or parallel=single"
        )
    lockstep, rider, ep = None, None, Axis()
    if seat.size > 1:
        mesh.join(seat, s.device)
        ep = mesh.axis(s.parallel, "ep", seat)
    model, text = build_model(s, seat.rank, ep)
    runner = runner_of(model, s.serve, build_device(s))
    if ep.size > 1:
        eplb = s.parallel.eplb
        rider = build_rider(model, runner.cache, eplb, seat, planner) if eplb.enabled else None
        port = mesh.agreement(s.parallel.agree, seat, ep, row_width(s.parallel))
        size = ragged if s.parallel.dispatch == "alltoall" else bucket
        lockstep = Lockstep(port, rider=rider, size=size)
        if port.bell is not None:
            mail.watch(port.bell)
    ties = None
    if s.serve.handoff is not None:
        ties = build_ties(s, seat)
        mail.watch(ties.net.inbox)
    return engine_on(runner, s.serve, s.speculate, mail, lockstep, ties=ties), text
