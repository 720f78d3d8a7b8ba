"""One-sided copies by NIXL over UCX: host memory between processes of a machine, RDMA or NVLink between GPUs and nodes.

The port is parallel/port.py. UCX and NIXL read their environment when this file is first imported, so scripts set it
before: NIXL_LOG_LEVEL=ERROR (its INFO lines go to stdout), UCX_TLS to choose transports (unset: the best there is, on
one machine `cma` for data and `tcp` for messages; with InfiniBand `rc,cuda_copy,cuda_ipc`), UCX_NET_DEVICES for the
cards. A copy over CMA runs inside `post`, with the GIL released: parallel/offload.py puts it on a thread.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nixl_cu12 import _bindings as raw
from nixl_cu12._api import nixl_agent, nixl_agent_config

from parallel.port import BUSY, DONE, OPS, LinkError, PeerLost, SpanError, check, fit

OWN = "NIXL_INIT_AGENT"
FAILURES = tuple(e for e in vars(raw).values() if isinstance(e, type) and issubclass(e, Exception))


@dataclass(frozen=True)
class LinkSettings:
    """``progress``: a thread of UCX that spins, for peers that poll seldom; without it bulk copies are faster on a
    machine with few cores, and messages wait until the peer polls. ``error_handling`` none allows UCX_TLS=shm."""

    progress: bool = True
    error_handling: str = "peer"
    threads: int = 0  # of UCX, for its own pool of workers

    def __post_init__(self):
        if self.error_handling not in ("peer", "none"):
            raise ValueError(f"error_handling must be peer or none, got {self.error_handling!r}")


@dataclass(frozen=True)
class Region:
    base: int
    size: int
    memory: str  # NIXL's name of it: DRAM, VRAM
    device: int


@dataclass
class Peer:
    regions: list[Region]
    lost: str = ""  # why


@dataclass
class Prepared:
    handle: Any
    lengths: np.ndarray  # [n]
    peer: str | None


@dataclass
class Ticket:
    peer: str
    transfer: Any
    lists: list[Prepared] = field(default_factory=list)  # made for this post alone
    done: bool = False


class NixlLink:
    def __init__(self, name: str, settings: LinkSettings | None = None):
        s = settings or LinkSettings()
        self.name = name
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=s.progress, backends=[]))
        options = {"ucx_error_handling_mode": s.error_handling}
        if s.threads:
            options["num_threads"] = str(s.threads)
        with self._failures(name):
            self._agent.create_backend("UCX", options)
        self._regions: list[Region] = []
        self._registered: list[tuple[Any, Any]] = []  # NIXL's record, and the buffer, kept alive
        self._peers: dict[str, Peer] = {}

    # --- who is there, and what memory they have ---

    def register(self, buffer: Any) -> int:
        region = region_of(buffer)
        with self._failures(self.name):
            record = self._agent.register_memory([(region.base, region.size, region.device, "")], region.memory)
        self._registered.append((record, buffer))
        self._regions.append(region)
        return len(self._regions) - 1

    def about(self) -> bytes:
        regions = [[r.base, r.size, r.memory, r.device] for r in self._regions]
        with self._failures(self.name):
            metadata = self._agent.get_agent_metadata()
        return json.dumps({"name": self.name, "regions": regions, "nixl": metadata.hex()}).encode()

    def meet(self, about: bytes) -> str:
        try:
            told = json.loads(about)
            name, metadata = told["name"], bytes.fromhex(told["nixl"])
            regions = [Region(int(b), int(s), str(m), int(d)) for b, s, m, d in told["regions"]]
        except (ValueError, TypeError, KeyError) as error:
            raise LinkError(f"not what a link says about itself: {error}") from None
        self.forget(name)
        with self._failures(name):
            met = self._agent.add_remote_agent(metadata)
        met = met.decode() if isinstance(met, bytes) else met
        if met != name:
            raise LinkError(f"a peer that calls itself {name} has the metadata of {met}")
        self._peers[name] = Peer(regions)
        return name

    def forget(self, peer: str) -> None:
        if self._peers.pop(peer, None) is not None:
            try:
                self._agent.remove_remote_agent(peer)
            except FAILURES:
                pass  # it is gone by itself

    # --- copies ---

    def prepare(self, spans: np.ndarray, peer: str | None = None) -> Prepared:
        regions = self._regions if peer is None else self._peer(peer).regions
        whose = self.name if peer is None else peer
        spans = check(spans, [r.size for r in regions], whose)
        used = [regions[i] for i in np.unique(spans[:, 0]).tolist()]
        if len({r.memory for r in used}) > 1:
            raise SpanError(f"spans of {whose} lie in memory of several kinds; post them apart")
        rows = np.empty((len(spans), 3), np.uint64)
        rows[:, 0] = np.array([r.base for r in regions], np.uint64)[spans[:, 0]] + spans[:, 1].astype(np.uint64)
        rows[:, 1] = spans[:, 2]
        rows[:, 2] = np.array([r.device for r in regions], np.uint64)[spans[:, 0]]
        with self._failures(whose):
            handle = self._agent.prep_xfer_dlist(OWN if peer is None else peer, rows, used[0].memory)
        return Prepared(handle, spans[:, 2].copy(), peer)

    def post(self, op: str, peer: str, local: Any, remote: Any, note: bytes = b"") -> Ticket:
        assert op in OPS, op
        self._peer(peer)
        ticket = Ticket(peer, None)
        try:
            mine, at = self._listed(ticket, local, None)
            theirs, there = self._listed(ticket, remote, peer)
            lengths = [np.stack((n, n, p.lengths[n]), 1) for p, n in ((mine, at), (theirs, there))]
            fit(*lengths)
            with self._failures(peer):
                ticket.transfer = self._agent.make_prepped_xfer(op.upper(), mine.handle, at, theirs.handle, there, note)
                self._state(ticket, self._agent.transfer(ticket.transfer))
        except (LinkError, SpanError):
            self._release(ticket)
            raise
        return ticket

    def poll(self, ticket: Ticket) -> str:
        if not ticket.done:
            try:
                with self._failures(ticket.peer):
                    self._state(ticket, self._agent.check_xfer_state(ticket.transfer))
            except LinkError:
                self._release(ticket)
                raise
        if not ticket.done:
            return BUSY
        self._release(ticket)
        return DONE

    # --- messages ---

    def notify(self, peer: str, note: bytes) -> None:
        self._peer(peer)
        with self._failures(peer):
            self._agent.send_notif(peer, note)

    def notes(self) -> list[tuple[str, bytes]]:
        with self._failures(self.name):
            came = self._agent.get_new_notifs()
        text = lambda name: name.decode() if isinstance(name, bytes) else name  # noqa: E731
        return [(text(peer), bytes(note)) for peer, notes in came.items() for note in notes]

    def close(self) -> None:
        """Forget peers and give back the regions; the link is of no use afterwards."""
        for peer in list(self._peers):
            self.forget(peer)
        for record, _ in self._registered:
            self._agent.deregister_memory(record)
        self._registered.clear()

    # --- inside ---

    def _peer(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            raise PeerLost(name, "it was never met")
        if peer.lost:
            raise PeerLost(name, peer.lost)
        return peer

    def _listed(self, ticket: Ticket, given: Any, peer: str | None) -> tuple[Prepared, np.ndarray]:
        if isinstance(given, tuple):
            return given[0], np.asarray(given[1], np.int32)
        prepared = self.prepare(given, peer)
        ticket.lists.append(prepared)
        return prepared, np.arange(len(prepared.lengths), dtype=np.int32)

    def _state(self, ticket: Ticket, state: str) -> None:
        if state == "ERR":
            raise LinkError(f"a copy with {ticket.peer} failed")
        ticket.done = state == "DONE"

    def _release(self, ticket: Ticket) -> None:
        handles = [ticket.transfer, *(p.handle for p in ticket.lists)]
        ticket.transfer, ticket.lists = None, []
        for handle in handles:
            if handle is not None:
                try:
                    handle.release()
                except FAILURES:
                    pass  # NIXL keeps it and tries again when the agent ends

    @contextmanager
    def _failures(self, peer: str) -> Iterator[None]:
        """NIXL's errors as ours; a peer that disconnects is remembered as lost."""
        try:
            yield
        except raw.nixlRemoteDisconnectError as error:
            if peer in self._peers:
                self._peers[peer].lost = "its process ended or the connection broke"
            raise PeerLost(peer, f"its process ended or the connection broke ({error})") from None
        except FAILURES as error:
            raise LinkError(f"{type(error).__name__} with {peer}: {error}") from None


def region_of(buffer: Any) -> Region:
    """Where a contiguous numpy array or torch tensor lies; torch need not be there. Raises ValueError for others."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous or not buffer.nbytes:
            raise ValueError(f"only contiguous arrays with bytes can be registered, got shape {buffer.shape}")
        return Region(buffer.ctypes.data, buffer.nbytes, "DRAM", 0)
    if not buffer.is_contiguous() or not buffer.nbytes:
        raise ValueError(f"only contiguous tensors with bytes can be registered, got shape {tuple(buffer.shape)}")
    on_host = buffer.device.type == "cpu"
    return Region(
        buffer.data_ptr(), buffer.nbytes, "DRAM" if on_host else "VRAM", 0 if on_host else buffer.get_device()
    )
