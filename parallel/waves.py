"""Waves: when data-parallel ranks step together, and when they sleep. Pure values; n ranks.

Ranks that share experts must take every step together, but an idle system should not step at all. So all step while a
wave runs: a rank without work runs the dummy step, since the others' collectives need it. A wave ends when nobody has
unfinished work, in the same step for all.

    idle   --start(wave)-->  running  --nobody unfinished-->  idle, wave + 1
    running  --all pause at the same generation-->  paused, wave + 1  --resume(generation)-->  running

**In the row.** Engines that meet every 32 steps to ask whether anyone is unfinished step up to 31 times for nothing,
and keep counters that must not drift. Here all ranks agree on a row in each step anyway (`parallel.agree`), before
its forward pass: `flags` ride in that row at no cost, and the step in which nobody has work is the one that ends the
wave, without a forward pass. Decisions are functions of rows that are equal on all ranks, so that ranks cannot
disagree.

**Start.** The first rank with work in an idle system announces start(w), with its wave, to all others. A rank honours
it if w is not less than its own wave: earlier ones are stale and change nothing. It remembers the wave asked for,
also while paused or still in the step that ends the wave before, so that no start is lost.

**Pause and resume** reach each rank as messages, in order, with a generation that rises by one for each pause. Phase
one: the rank plans no more work, but keeps stepping and honours starts; a pause wakes an idle system, since consensus
needs a step. Phase two: when all rows of a step carry the same generation, all are paused together, and what was
started before is stale from then on. resume(generation) starts the next wave; who resumes first waits in its first
agreement for the others. A resume that overtakes consensus takes the pause back."""

from dataclasses import dataclass, replace

import numpy as np

COLUMNS = 3  # of `flags`: wave, unfinished, generation of the pause
SLEEP, WORK, DUMMY = "sleep", "work", "dummy"


class OutOfStep(RuntimeError):
    """Ranks of different waves met in one step."""


@dataclass(frozen=True)
class Wave:
    """A rank's view."""

    wave: int = 0  # that runs, or would be the next
    asked: int = -1  # highest wave that anyone asked for
    pausing: int = 0  # generation of the pause that is asked for or reached, 0: none
    paused: bool = False
    generation: int = 0  # highest seen

    @property
    def running(self) -> bool:
        """Whether this rank steps: if so it agrees with all, work or not."""
        return self.asked >= self.wave and not self.paused

    @property
    def plans(self) -> bool:
        """Whether it may plan work in the step."""
        return self.running and not self.pausing


def wants(state: Wave) -> tuple[Wave, int | None]:
    """This rank has work. Returns the wave to announce to all others, None where that is not needed: it runs already,
    or is paused and will start with the resume."""
    if state.running or state.paused:
        return state, None
    return replace(state, asked=state.wave), state.wave


def started(state: Wave, wave: int) -> Wave:
    """Another rank announced ``wave``. Stale ones change nothing."""
    return replace(state, asked=max(state.asked, wave))


def pause(state: Wave, generation: int) -> tuple[Wave, int | None]:
    """Phase one. Returns the wave to announce, as `wants`. Old generations change nothing."""
    if generation <= state.generation:
        return state, None
    announced = None if state.running or state.paused else state.wave
    return replace(state, pausing=generation, generation=generation, asked=max(state.asked, state.wave)), announced


def resume(state: Wave, generation: int) -> Wave:
    """End the pause of that generation, or take it back where consensus was not reached. Others change nothing."""
    if generation != state.pausing:
        return state
    return replace(state, pausing=0, paused=False, asked=max(state.asked, state.wave))


def flags(state: Wave, unfinished: bool) -> tuple[int, int, int]:
    """What a running rank adds to its row of the step."""
    assert state.running, state
    return state.wave, int(unfinished), state.pausing


def settle(state: Wave, rows: np.ndarray) -> Wave:
    """The state after a step, from the flags of all ranks [n, COLUMNS].

    ``plans`` of the state before says who could work in this step; the forward pass takes place if any rank has tokens.
    Raises `OutOfStep` naming the ranks of another wave.
    """
    wave, unfinished, pausing = (column.tolist() for column in rows.T)
    if (others := [r for r, w in enumerate(wave) if w != state.wave]) or not state.running:
        raise OutOfStep(f"waves: this rank is in wave {state.wave}, ranks {others} in {[wave[r] for r in others]}")
    if pausing[0] and pausing.count(pausing[0]) == len(pausing):
        # a later pause or a resume may be on its way to us, but it is not in our row: it is read after this step
        assert state.pausing == pausing[0], state
        return replace(state, wave=state.wave + 1, paused=True)
    if any(unfinished) or any(pausing):
        return state
    return replace(state, wave=state.wave + 1)


def action(state: Wave, tokens: int, all_tokens: int) -> str:
    """What a rank does after the agreement: a step is run by all ranks or by none."""
    if not state.running or all_tokens == 0:
        return SLEEP
    return WORK if tokens else DUMMY
