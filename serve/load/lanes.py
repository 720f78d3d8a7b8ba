"""AgentX: N lanes, each with one live session tree, as InferenceX plays them (aiperf docs/tutorials/agentx-mvp.md,
agentx-harness docs/benchmark-modes/semianalysis-agentx-faq.md).

A stream sends a request when the one before it has ended and its recorded think time is over; its subagents start at
their recorded offsets and gate its next request, unless they run in the background. What a server writes is thrown
away: the next prompt is the recorded one. A lane takes the next tree once its tree has drained.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serve.clock import Clock
from serve.load.agenda import Agenda, Caps, Over, Stream
from serve.load.drive import Driver
from serve.load.filler import Scale
from serve.load.trees import SUBAGENTS, Branch, Play, Step, Tree


@dataclass(frozen=True)
class LaneSettings:
    """``start`` is the share of a tree's recorded duration that lies behind it when the run begins, drawn from this
    range; ``warmup_requests`` further requests of each lane are played before anything counts."""

    lanes: int
    scale: Scale
    caps: Caps
    seed: int
    start: tuple[float, float] = (0.25, 0.75)
    warmup_requests: int = 10
    subagents: str = "shared"

    def __post_init__(self):
        if self.lanes < 1:
            raise ValueError(f"lanes must be >= 1, got {self.lanes}")
        low, high = self.start
        if not 0 <= low <= high <= 1:
            raise ValueError(f"start must be two shares, low to high, between 0 and 1, got {list(self.start)}")
        if self.warmup_requests < 0:
            raise ValueError(f"warmup_requests must be >= 0, got {self.warmup_requests}")
        if self.subagents not in SUBAGENTS:
            raise ValueError(f"subagents must be one of {', '.join(SUBAGENTS)}, got {self.subagents!r}")


@dataclass(eq=False)
class Played:
    """A tree's stay in its lane; times by the clock."""

    number: int
    lane: int
    session: str
    begin_s: float
    end_s: float | None = None  # None: the run ended first


@dataclass(frozen=True, eq=False)
class Start:
    """Where a lane begins: ``warmup`` is what it plays first, ``past`` [S] what of the tree then lies behind it, up to
    the recorded time ``cut_s``."""

    play: Play
    warmup: list[Step]
    past: np.ndarray
    cut_s: float


class Lanes:
    """``played`` tells which tree was live where and when, ``agenda.capped_s`` what was cut from idle time, and
    ``begin_s`` when the warm-up was over."""

    def __init__(self, trees: Sequence[Tree], settings: LaneSettings, driver: Driver, clock: Clock, vocab: np.ndarray):
        self.trees = [t for t in trees if t.steps]
        if not self.trees:
            raise ValueError("no session is left to play: raise max_request_tokens, or give another trace")
        self.settings, self.driver, self.clock, self.vocab = settings, driver, clock, vocab
        self.agenda = Agenda(clock, settings.caps)
        self.played: list[Played] = []
        self.begin_s: float | None = None
        self._order = self._shuffled()
        self._tasks: list[asyncio.Task] = []

    async def run(self, duration_s: float | None, drain_s: float) -> None:
        """Warm up every lane, then play. Raises ValueError if a root's warm-up request fails."""
        self.spawn(self.agenda.run())
        try:
            starts = self._starts()
            await asyncio.gather(*(self.spawn(self._warm_up(start)) for start in starts))
            self.begin_s = self.clock.now()
            begun = [(start, self.agenda.begin(start.play.lane)) for start in starts]
            lanes = [self.spawn(self._lane(start, root)) for start, root in begun]
            await self.driver.within(self.clock.spawn(_first_error(lanes)), duration_s)
            self.agenda.close()
            await self.driver.drain(self._tasks, drain_s)
            for task in self._tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception()
        finally:
            self.agenda.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine) -> asyncio.Task:
        """A task that `run` waits for at its end, and whose error it raises."""
        self._tasks = [t for t in self._tasks if not t.done() or t.cancelled() or t.exception()]
        self._tasks.append(self.clock.spawn(work))
        return self._tasks[-1]

    # --- which tree, and from where ---

    def _shuffled(self) -> Iterator[Tree]:
        """Trees without end, each round in an order of its own."""
        rng = np.random.default_rng([self.settings.seed, 0])
        while True:
            for i in rng.permutation(len(self.trees)).tolist():
                yield self.trees[i]

    def _next(self, lane: int) -> Play:
        s, number = self.settings, len(self.played)
        play = Play(next(self._order), s.scale, self.vocab, s.seed, number, lane, s.subagents)
        self.played.append(Played(number, lane, play.tree.session.name, self.clock.now()))
        return play

    def _starts(self) -> list[Start]:
        """Each lane's first tree from a random time of it on. The warm-up is the last request of each live stream,
        then the lane's next ones, but never the tree's last."""
        rng, out = np.random.default_rng([self.settings.seed, 1]), []
        for lane in range(self.settings.lanes):
            play = self._next(lane)
            cut = float(rng.uniform(*self.settings.start)) * play.tree.session.duration_s
            past = np.array([s.start_s <= cut for s in play.tree.steps])
            further = [s for s in play.tree.in_time() if not past[s.number]]
            further = further[: min(self.settings.warmup_requests, max(0, len(further) - 1))]
            warmup = primers(play.tree, past) + further
            past[[s.number for s in further]] = True
            out.append(Start(play, warmup, past, max([cut, *(s.start_s for s in further)])))
        return out

    async def _warm_up(self, start: Start) -> None:
        """Without a pause, one token each."""
        for step in start.warmup:
            record = await self.driver.send(start.play.request(step, warmup=True))
            if record.failed and step.branch is start.play.tree.root:
                why = record.usage.message or record.usage.finish
                raise ValueError(f"warm-up of lane {start.play.lane} failed, session {record.session}: {why}")

    # --- play ---

    async def _lane(self, start: Start, root: Stream) -> None:
        """Trees one after the other, the first from where its warm-up left it. The lane is busy in between."""
        play, past, cut, resumed = start.play, start.past, start.cut_s, True
        try:
            while True:
                await Player(self, play, past).stream(play.tree.root, root, cut, resumed)
                self.played[play.number].end_s = self.clock.now()
                play = self._next(play.lane)
                past, cut, resumed = np.zeros(len(play.tree.steps), bool), 0.0, False
        except Over:
            pass
        finally:
            self.agenda.end(root)


class Player:
    """The streams of one tree."""

    def __init__(self, lanes: Lanes, play: Play, past: np.ndarray):
        self.lanes, self.play, self.past = lanes, play, past
        self.agenda, self.time = lanes.agenda, lanes.settings.scale.time

    async def stream(self, branch: Branch, me: Stream, cut: float, resumed: bool) -> None:
        """Play what is left of a branch and wait for its subagents. Raises Over at the run's end.

        ``ended`` is when its last call ended by the lane's clock, ``recorded`` the same by the recording.
        """
        lane, children = me.lane, []
        ended, recorded, first = self.agenda.time(lane), cut, resumed
        for event in branch.events:
            if isinstance(event, Branch):
                children += self.spawn(event, lane, ended, recorded, cut)
            elif not self.past[event.number]:
                await self.agenda.join(lane, [c for c, background in children if not background])
                await self.agenda.until(lane, ended + self.time * pause(event, recorded, first))
                await self.send(event)
                ended, recorded, first = self.agenda.time(lane), event.end_s, False
        await self.agenda.join(lane, [c for c, _ in children])

    def spawn(self, branch: Branch, lane: int, ended: float, recorded: float, cut: float) -> list[tuple[Stream, bool]]:
        """Begin a subagent, if anything of it is left: at its recorded offset, or at once where it is under way."""
        left = [s for s in branch.every() if not self.past[s.number]]
        if not left:
            return []
        me = self.agenda.begin(lane)
        resumed = any(self.past[s.number] for s in branch.every())
        due = ended if resumed else ended + self.time * max(0.0, branch.start_s - recorded)
        self.lanes.spawn(self.child(branch, me, due, cut if resumed else branch.start_s, resumed))
        return [(me, branch.background)]

    async def child(self, branch: Branch, me: Stream, due: float, cut: float, resumed: bool) -> None:
        try:
            await self.agenda.until(me.lane, due)
            await self.stream(branch, me, cut, resumed)
        except Over:
            pass
        finally:
            self.agenda.end(me)

    async def send(self, step: Step) -> None:
        if self.lanes.driver.closed:
            raise Over
        await self.lanes.driver.send(self.play.request(step))


def pause(step: Step, recorded: float, resumed: bool) -> float:
    """Recorded seconds from the end of a stream's last call to this one; where it is resumed, from the cut."""
    if resumed or step.turn.think_s is None:
        return max(0.0, step.start_s - recorded)
    return step.turn.think_s


def primers(tree: Tree, past: np.ndarray) -> list[Step]:
    """The last request behind the start of each stream that is live there, and of the root in any case."""
    out = []
    for branch in tree.root.branches():
        behind = [s for s in branch.steps() if past[s.number]]
        alive = any(not past[s.number] for s in branch.steps())
        if behind and (alive or branch is tree.root):
            out.append(behind[-1])
    return sorted(out, key=lambda s: (s.start_s, s.number))


async def _first_error(tasks: list[asyncio.Task]) -> None:
    """Until all have ended, or one has failed."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
