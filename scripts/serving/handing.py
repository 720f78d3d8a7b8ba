"""What joins an engine to those it hands requests to: a link for bytes, a net for letters, and its name and life."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from parallel.mesh import Seat
from parallel.offload import Offloaded
from parallel.port import Link
from scripts.build import Settings
from scripts.serving.torchrun import Inboxes
from serve.disagg.exchange import Closing, Exchange
from serve.disagg.handoff import Rules
from serve.disagg.lease import Pulse
from serve.disagg.pools import card, register
from serve.disagg.transfer import Net, Transfer
from serve.runner import Runner
from serve.schedule.scheduler import Scheduler
from serve.wire.net import LetterNet


@dataclass(frozen=True)
class Ties:
    """``weights`` names the checkpoint; ``born`` is larger in each life of an engine. ``owned``: what ends with it."""

    link: Link
    net: Net
    born: int
    weights: str
    pulse: bool = False
    owned: tuple[Closing, ...] = ()


def exchange_on(scheduler: Scheduler, runner: Runner, ties: Ties, rules: Rules, now: Callable[[], float]) -> Exchange:
    """The exchange of an engine whose cache is ``runner``'s; ``now`` is its clock, in seconds."""
    model = runner.model
    register(ties.link, runner.cache)
    mine = card(model.layout, model.rt.dtype, ties.weights)
    transfer = Transfer(ties.link.name, ties.born, mine, ties.link, ties.net, rules)
    pulse = Pulse(transfer.beat, now, rules.beat_s / 2) if ties.pulse else None
    return Exchange(scheduler, transfer, rules, pulse, ties.owned)


def build_ties(s: Settings, seat: Seat) -> Ties:
    """NIXL, and an inbox under ``seat.post`` or, where torchrun started the ranks, by its store.

    Raises ValueError for a seat without a name: this script starts no engines that could hand requests over.
    """
    if not seat.name:
        raise ValueError("serve.handoff needs several engines: use scripts.server, or serve.handoff=null")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # its INFO lines go to stdout
    from parallel.link import LinkSettings, NixlLink  # loads UCX: only where it is chosen

    link = Offloaded(NixlLink(seat.name, LinkSettings(progress=False)))
    net = LetterNet(seat.name, Folder(seat.post) if seat.post else Inboxes())
    weights = f"{s.checkpoint} {s.numerics} {s.seed if s.random else ''}"
    return Ties(link, net, time.time_ns(), weights, True, (net, link))


@dataclass(frozen=True)
class Folder:
    """Inboxes of engines on this machine."""

    path: str

    def bind(self, engine: str) -> str:
        return self.find(engine)

    def bound(self, engine: str, address: str) -> None:
        pass

    def find(self, engine: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]+\.[0-9]+", engine):
            raise ValueError(f"{engine!r} is no engine's name: letters, digits, - and _, a dot, and its rank")
        return f"ipc://{self.path}/{engine}"
