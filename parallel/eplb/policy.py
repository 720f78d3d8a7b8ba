"""Which expert each slot should hold, from loads. L layers, E experts, P slots, R ranks, S = P / R slots a rank.

After deepseek-ai/EPLB: `replicate` gives spare slots to the experts with most load per replica, `pack` puts replicas,
heaviest first, on the lightest rank with room. Here both run over all layers at once; replicas of one expert go to
ranks of their own; experts that are busy at the same times go to different ranks; `refine` swaps slots between the
heaviest rank and others, and `settle` numbers ranks and slots so that little moves. numpy only; ``pause`` is called
between small calls, so that a planning thread can let others run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from parallel.eplb import metric

Pause = Callable[[], None]
PRIOR = 0.01  # of a layer's mean load, added to every expert: one not seen lately is not free
CLOSE = 1.003  # heaviest over mean rank at which a layer is left alone
FAIR = 1.02  # the same, at which other numbers of replicas are not tried
HEAVY = 64  # experts whose replicas decide how even it can get
SWAPS, PARTNERS, GAIN = 24, 4, 1e-3  # most swaps a layer; lightest ranks to swap with; least gain, of a rank's mean
TIMES = 8  # most stretches of time to tell apart
APART = 1e30  # keeps replicas of one expert on different ranks, unless no other rank has room


@dataclass(frozen=True)
class Slots:
    """``redundant`` slots beside one for each expert, over ``ranks``. ``hierarchical``: groups of experts (those of
    group-limited routing) keep to one of ``nodes`` each, replicas inside."""

    experts: int
    ranks: int
    redundant: int = 0
    policy: str = "global"
    groups: int = 1
    nodes: int = 1

    def __post_init__(self):
        if self.experts < 1 or self.ranks < 1 or self.redundant < 0:
            raise ValueError(f"eplb: experts and ranks must be >= 1, redundant >= 0, got {self}")
        if self.total % self.ranks:
            raise ValueError(
                f"parallel.eplb.redundant={self.redundant}: {self.experts} experts and that many slots more do not "
                f"divide over {self.ranks} ranks"
            )
        if self.total > self.experts * self.ranks:
            raise ValueError(
                f"parallel.eplb.redundant={self.redundant} is more than a replica of each of {self.experts} experts on "
                f"each of {self.ranks} ranks"
            )
        if self.policy not in ("global", "hierarchical"):
            raise ValueError(f"parallel.eplb.policy must be global or hierarchical, got {self.policy!r}")
        if self.policy == "hierarchical" and (
            self.nodes < 1 or self.groups % self.nodes or self.experts % self.groups or self.ranks % self.nodes
        ):
            raise ValueError(
                f"parallel.eplb.policy=hierarchical needs nodes ({self.nodes}) that divide groups ({self.groups}) and "
                f"ranks ({self.ranks}), and groups that divide experts ({self.experts}); or use policy=global"
            )

    @property
    def total(self) -> int:
        """P."""
        return self.experts + self.redundant

    @property
    def replicas(self) -> int:
        """Most replicas an expert can have."""
        return min(self.ranks, 1 + self.redundant)


def plan(
    load: np.ndarray, slots: Slots, old: np.ndarray | None = None, rows: np.ndarray | None = None,
    pause: Pause = lambda: None,
) -> np.ndarray:  # fmt: skip
    """Expert [L, P] of each slot, rank by rank, for loads [L, E] >= 0; every expert has a slot at least.

    With ``old`` ranks and slots are numbered so that as many as possible stay as they are there. ``rows`` [K, L, E]:
    loads of consecutive stretches of time, which tell what is busy together. Raises ValueError for loads of another
    shape, or that are negative or not finite.
    """
    load = np.asarray(load, np.float64)
    if load.ndim != 2 or load.shape[1] != slots.experts:
        raise ValueError(f"eplb: loads must be [layers, {slots.experts}], got shape {load.shape}")
    if not np.isfinite(load).all() or (load < 0).any():
        raise ValueError("eplb: loads must be finite and >= 0")
    load, times = _relative(load), _profile(load, rows)
    if slots.policy == "hierarchical" and slots.nodes > 1:
        return _hierarchical(load, times, slots, old, pause)
    new = _balance(load, times, slots.total, slots.ranks, pause)
    return new.reshape(len(load), -1) if old is None else settle(new, old, slots.experts)


def _relative(load: np.ndarray) -> np.ndarray:
    """Loads [.., E] over their mean, none of them zero."""
    mean = load.mean(-1, keepdims=True)
    return load / np.where(mean > 0, mean, 1) + PRIOR


def _profile(load: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """Relative loads [L, E, C] of up to TIMES stretches of time; those of all time where none are given."""
    if rows is None or not len(rows):
        return _relative(load)[..., None]
    cuts = np.linspace(0, len(rows), min(TIMES, len(rows)) + 1).astype(int)[:-1]
    return np.ascontiguousarray(_relative(np.add.reduceat(rows.astype(np.float64), cuts, 0)).transpose(1, 2, 0))


def worthwhile(load: np.ndarray, old: np.ndarray, new: np.ndarray, ranks: int, min_gain: float) -> np.ndarray:
    """Layers [L] whose heaviest rank would get lighter by more than ``min_gain`` of it, and by more than chance makes
    an even load look uneven."""
    before, after = (metric.rank_loads(metric.slot_loads(load, p), ranks) for p in (old, new))
    most = np.maximum(before.max(1), 1e-300)
    chance = np.sqrt(2 * np.log(max(ranks, 2)) / np.maximum(before.mean(1), 1e-300))
    gain = 1 - after.max(1) / most
    return (gain > min_gain) & (gain > np.minimum(chance, 0.5)) & (before.max(1) > 0)


def _hierarchical(
    load: np.ndarray, times: np.ndarray, slots: Slots, old: np.ndarray | None, pause: Pause
) -> np.ndarray:
    """Groups to nodes, then each node by itself. Which node has which groups is fixed anew each time; ranks and slots
    are settled within a node."""
    layers, per, nodes = len(load), slots.experts // slots.groups, slots.nodes
    group = load.reshape(layers, slots.groups, per).sum(-1)
    together = times.reshape(layers, slots.groups, per, -1).sum(2)
    where = _balance(group, together, slots.groups, nodes, pause)  # [L, nodes, groups / nodes]
    if old is not None:
        homes = old.reshape(layers, nodes, -1) // per
        where = _number(where, homes, slots.groups)
    ids = (where[..., None] * per + np.arange(per)).reshape(layers * nodes, -1)  # experts of each node
    mine = np.take_along_axis(np.repeat(load, nodes, 0), ids, 1)
    times = np.take_along_axis(np.repeat(times, nodes, 0), ids[..., None], 1)
    inner = _balance(mine, times, slots.total // nodes, slots.ranks // nodes, pause)
    new = np.take_along_axis(ids, inner.reshape(len(ids), -1), 1)
    if old is not None:
        new = settle(new.reshape(inner.shape), old.reshape(len(ids), -1), slots.experts)
    return new.reshape(layers, -1)


def _balance(load: np.ndarray, times: np.ndarray, total: int, ranks: int, pause: Pause) -> np.ndarray:
    """Experts [L, R, S] of ranks, for loads [L, E], which are ``times`` [L, E, C] one after another.

    Spare slots for the hottest are best unless few hot experts fill the ranks (8 of them with 40 replicas leave 8 of 32
    ranks with two, 32 replicas do not): where it is not even, fewer of them are tried.
    """
    if ranks == 1:
        return np.tile(np.arange(load.shape[1]), (len(load), 1))[:, None]
    held, worst = _placed(load, times, replicate(load, total, ranks, pause=pause), ranks, pause)
    uneven = np.flatnonzero(worst > FAIR)
    if len(uneven) and total > load.shape[1]:
        hot = load[uneven]
        count = replicate(hot, total, ranks, sparing(hot, total, ranks, pause), pause)
        other, its = _placed(hot, times[uneven], count, ranks, pause)
        better = its < worst[uneven]
        held[uneven[better]] = other[better]
    return held


def _placed(
    load: np.ndarray, times: np.ndarray, count: np.ndarray, ranks: int, pause: Pause
) -> tuple[np.ndarray, np.ndarray]:
    """Experts [L, R, S] of ranks for replicas [L, E], and heaviest over mean rank [L]."""
    layers, among = load.shape
    share = load / count
    experts = np.repeat(np.tile(np.arange(among), layers), count.ravel()).reshape(layers, -1)
    order = np.argsort(-np.take_along_axis(share, experts, 1), 1, kind="stable")
    experts = np.take_along_axis(experts, order, 1)
    held = pack(times / count[..., None], experts, ranks, pause)
    separate(held, among)
    refine(held, share, pause)
    sums = np.take_along_axis(share, held.reshape(layers, -1), 1).reshape(held.shape).sum(-1)
    return held, sums.max(1) / sums.mean(1)


def replicate(
    load: np.ndarray, total: int, ranks: int, hottest: np.ndarray | None = None, pause: Pause = lambda: None
) -> np.ndarray:
    """Replicas [L, E] of each expert, 1 .. ``ranks``, ``total`` in all: one more, again and again, for the expert with
    most load per replica; after ``hottest`` [L] of them, for the coldest."""
    rows = np.arange(len(load))
    count, share = np.ones(load.shape, np.int64), load.copy()
    for i in range(total - load.shape[1]):
        more = share.argmax(1)
        if hottest is not None:
            cold = np.where(count < ranks, count * APART + load, inf).argmin(1)
            more = np.where(i < hottest, more, cold)
        count[rows, more] += 1
        now = count[rows, more]
        share[rows, more] = np.where(now < ranks, load[rows, more] / now, -inf)
        pause()
    return count


def sparing(load: np.ndarray, total: int, ranks: int, pause: Pause = lambda: None) -> np.ndarray:
    """How many of the spare slots to give to the hottest [L]: the most with the least bound on the heaviest rank.

    Some rank has the heaviest replica, some rank two of the R + 1 heaviest, some rank three of the 2 R + 1 heaviest,
    and each is filled up with light ones.
    """
    each, layers = total // ranks, np.arange(len(load))
    filler = np.concatenate((np.zeros((len(load), 1)), np.sort(load, 1).cumsum(1)), 1)
    filler = [filler[:, max(each - n, 0)] for n in (1, 2, 3)]
    top = np.sort(load, 1)[:, : -HEAVY - 1 : -1]
    count, best, chosen = np.ones_like(top), np.full(len(load), inf), np.zeros(len(load), np.int64)
    for spare in range(total - load.shape[1] + 1):
        share = np.where(count > ranks, -inf, top / count)
        order = np.argsort(-share, 1)
        upto = np.take_along_axis(count, order, 1).cumsum(1)
        at = lambda n: np.where(upto[:, -1] < n, 0, share[layers, order[layers, (upto >= n).argmax(1)]])  # noqa: B023, E731
        second, third = at(ranks + 1), at(2 * ranks + 1)
        bound = np.maximum.reduce((
            at(1) + filler[0], np.where(second > 0, at(ranks) + second + filler[1], 0),
            np.where(third > 0, 3 * third + filler[2], 0),
        ))  # fmt: skip
        chosen = np.where(bound <= best, spare, chosen)
        best = np.minimum(bound, best)
        count[layers, order[:, 0]] += 1
        pause()
    return chosen


def pack(times: np.ndarray, experts: np.ndarray, ranks: int, pause: Pause = lambda: None) -> np.ndarray:
    """Experts [L, R, S] of ranks, for replicas [L, P] in descending load: each goes to a rank with room that does not
    hold its expert, or else to any with room; of these to the one that is lightest at the times at which it is heavy.

    times [L, E, C]: load of one replica.
    """
    layers, total = experts.shape
    each, rows = total // ranks, np.arange(layers)
    held, used = np.zeros((layers, ranks, each), np.int64), np.zeros((layers, ranks), np.int64)
    sums, full = np.zeros((layers, ranks, times.shape[2])), np.zeros((layers, ranks))
    apart = np.zeros((layers, times.shape[1], ranks))
    for i in range(total):
        e = experts[:, i]
        load = times[rows, e]
        rank = ((sums @ load[..., None])[..., 0] + apart[rows, e] + full).argmin(1)
        at = used[rows, rank]
        held[rows, rank, at] = e
        used[rows, rank] = at + 1
        apart[rows, e, rank] = APART
        sums[rows, rank] += load
        full[rows, rank] = np.where(at + 1 < each, 0, inf)
        pause()
    return held


def separate(held: np.ndarray, among: int) -> None:
    """Swap, in place, replicas of one expert that ended on one rank with those of a rank that can take them, if any.

    `pack` leaves few of them, so this goes one by one.
    """
    ordered = np.sort(held, -1)
    for layer, rank in np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(-1)).tolist():
        h = held[layer]
        for slot in range(h.shape[1]):
            e = h[rank, slot]
            if (h[rank, :slot] != e).all():
                continue
            free = (h != e).all(1, keepdims=True) & ~np.isin(h, h[rank])
            found = np.argwhere(free)
            if len(found):
                r, s = found[-1]  # packed last: light ones
                h[rank, slot], h[r, s] = h[r, s], e


def refine(held: np.ndarray, share: np.ndarray, pause: Pause = lambda: None) -> None:
    """Swap slots in place between the heaviest rank and any other while the heavier of the two gets lighter.

    held [L, R, S]; share [L, E]: load of one replica. No swap puts two replicas of an expert on one rank.
    """
    layers = len(held)
    weight = np.take_along_axis(share, held.reshape(layers, -1), 1).reshape(held.shape)
    has = np.zeros((*held.shape[:2], share.shape[1]), bool)
    np.put_along_axis(has, held, True, 2)
    live = np.arange(layers)
    for _ in range(SWAPS):
        sums = weight[live].sum(-1)
        live = live[sums.max(1) > CLOSE * sums.mean(1)]
        if not len(live):
            return
        live = live[_swap(live, held, weight, has)]
        pause()


def _swap(live: np.ndarray, held: np.ndarray, weight: np.ndarray, has: np.ndarray) -> np.ndarray:
    """The best swap of the heaviest rank with one of the lightest, in each layer ``live``, made in place. True [live]
    where it gained something."""
    n, each = len(live), held.shape[2]
    rows = np.arange(n)
    sums = weight[live].sum(-1)
    top = sums.argmax(1)
    light = np.argpartition(sums, min(PARTNERS, sums.shape[1] - 1), 1)[:, :PARTNERS]
    mine, ids = weight[live, top], held[live, top]  # [n, S]
    there = live[:, None], light
    its, theirs = weight[there].reshape(n, -1), held[there].reshape(n, -1)  # [n, Q]
    delta = mine[:, :, None] - its[:, None]  # [n, S, Q]: what the heaviest loses, the other gains
    high, low = sums[rows, top], np.repeat(np.take_along_axis(sums, light, 1), each, 1)
    worst = np.maximum(high[:, None, None] - delta, low[:, None] + delta)
    held_here = has[live[:, None], top[:, None], theirs]  # [n, Q]: the heaviest has what it would get
    held_there = has[live[:, None, None], light[:, None], ids[:, :, None]]  # [n, S, partners]
    worst[np.repeat(held_there, each, 2) | held_here[:, None]] = inf
    best = worst.reshape(n, -1).argmin(1)
    good = worst.reshape(n, -1)[rows, best] < high - GAIN * sums.mean(1)
    slot, at = np.divmod(best, theirs.shape[1])
    rank, place = light[rows, at // each], at % each
    l, t, s, r, p = (a[good] for a in (live, top, slot, rank, place))
    a, b = held[l, t, s], held[l, r, p]
    held[l, t, s], held[l, r, p] = b, a
    weight[l, t, s], weight[l, r, p] = weight[l, r, p], weight[l, t, s]
    has[l, t, a] = has[l, r, b] = False
    has[l, t, b] = has[l, r, a] = True
    return good


def settle(new: np.ndarray, old: np.ndarray, among: int) -> np.ndarray:
    """The plan [L, P] that holds what ``new`` [L, R, S] does, with ranks and then slots numbered to be as in ``old``
    [L, P] wherever they can."""
    layers, _, each = new.shape
    old = old.reshape(new.shape)
    new = _number(new, old, among)
    out, free = np.full(new.shape, -1), np.ones(new.shape, bool)
    for s in range(each):  # what stays, stays in its slot
        same = (new == old[:, :, s, None]) & free
        first = same.argmax(-1)[..., None]
        stays = np.take_along_axis(same, first, -1)[..., 0]
        out[stays, s] = old[stays, s]
        layer, rank = np.nonzero(stays)
        free[layer, rank, first[layer, rank, 0]] = False
    out[out < 0] = new[free]
    return out.reshape(layers, -1)


def _number(new: np.ndarray, old: np.ndarray, among: int) -> np.ndarray:
    """``new`` [L, R, S] with ranks renumbered: the pair (new, old [L, R, S']) that shares most becomes one rank, and so
    on."""
    layers, ranks, _ = new.shape
    has = np.zeros((2, layers, ranks, among), np.float32)
    for h, held in zip(has, (new, old), strict=True):
        np.put_along_axis(h, held, 1, 2)
    shared = has[1] @ has[0].transpose(0, 2, 1)  # [L, old, new]
    rows, source = np.arange(layers), np.zeros((layers, ranks), np.int64)
    for _ in range(ranks):
        to, was = np.divmod(shared.reshape(layers, -1).argmax(1), ranks)
        source[rows, to] = was
        shared[rows, to] = -1
        shared[rows, :, was] = -1
    return np.take_along_axis(new, source[..., None], 1)
