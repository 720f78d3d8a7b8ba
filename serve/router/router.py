"""Requests between one front end and many engines: each is placed, handed from prefill to decode, and tried again
elsewhere when its engine dies. Tokens are a function of request and position, so that the stream goes on as it was.

The front end sees `send` and is called with Outputs; engines are called with messages, and their outputs come to
`deliver`. Every try has a handle of its own, so that words of an earlier one are known for what they are. No I/O; the
clock is passed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from serve.request import Abort, Ask, Finish, Handed, Outputs
from serve.router.choice import RouterRules
from serve.router.course import Course, Try
from serve.router.fleet import Fleet, Member, Post
from serve.router.places import Place, Places


class Router:
    """``first`` is the first handle it gives to a try: above all that an earlier router gave to engines that still
    live. Engines are down until `joined`."""

    def __init__(
        self, posts: Sequence[Post], rules: RouterRules, page_size: int, to_engine: Callable[[str, Ask | Abort], None],
        to_front: Callable[[Outputs], None], now: Callable[[], float], first: int = 1,
    ):  # fmt: skip
        self.fleet, self.rules = Fleet(posts), rules
        self._places = Places(rules, self.fleet, page_size)
        self._to_engine, self._to_front, self._now = to_engine, to_front, now
        self._handles = count(first)
        self._courses: dict[int, Course] = {}  # by the front end's handle
        self._tries: dict[int, Try] = {}  # by the engine's
        self._waiting: dict[int, Course] = {}
        self._hopeless = ""  # why no engine will come any more
        self._last_words = "none has started"
        self.counts = dict.fromkeys(("placed", "handed", "retried", "strangers", "groups_lost"), 0)

    # --- from the front end ---

    def send(self, message: Ask | Abort) -> None:
        if isinstance(message, Abort):
            self._abort(message.handle)
        else:
            course = self._courses[message.handle] = Course(message)
            self._place(course)

    def _abort(self, handle: int) -> None:
        course = self._courses.get(handle)
        if course is None or course.aborted:
            return
        course.aborted = True
        if course.at is None:
            self._end(course, "abort")
        else:
            self._to_engine(course.at.engine.name, Abort(course.at.handle))

    # --- groups of engines ---

    def joined(self, group: str) -> None:
        """Its engines are up, and have nothing yet."""
        for member in self.fleet.of(group):
            assert not member.alive, f"{group} came back before it was lost"
            member.alive = True
        for course in list(self._waiting.values()):
            if course.ask.handle in self._waiting:
                del self._waiting[course.ask.handle]
                self._place(course)

    def lost(self, group: str, reason: str) -> None:
        """Its engines are gone with all they had: what they ran is tried elsewhere, what they lent is not revoked."""
        if not any(m.alive for m in self.fleet.of(group)):
            return
        self._last_words = reason
        self.counts["groups_lost"] += 1
        self.fleet.down(group)
        self._places.forget(group)
        for course in list(self._courses.values()):
            if course.lender is not None and not course.lender.engine.alive:
                self._drop_lender(course)
            if course.at is not None and not course.at.engine.alive:
                self._again(course, reason)

    def give_up(self, reason: str) -> None:
        """No engine will come any more: nobody waits for one."""
        self._hopeless = reason
        for course in list(self._waiting.values()):
            self._end(course, "error", reason, unavailable=True)

    def tick(self) -> None:
        """Call it now and then: ends requests that have waited too long for an engine."""
        late = self._now() - self.rules.wait_s
        for course in [c for c in self._waiting.values() if c.since <= late]:
            self._nobody(course)

    def _again(self, course: Course, reason: str) -> None:
        self._leave(course)
        if course.lender is not None:
            self._to_engine(course.lender.engine.name, Abort(course.lender.handle))
            self._drop_lender(course)
        if course.aborted:
            self._end(course, "abort")
        elif len(course.generated) >= course.ask.sampling.max_tokens:
            self._end(course, "length")  # its last words were lost, not its tokens
        elif course.retries == self.rules.retries:
            tries = f" (tried {course.retries + 1} times)" if course.retries else ""
            self._end(course, "error", reason + tries, unavailable=True)
        else:
            course.retries += 1
            self.counts["retried"] += 1
            self._place(course)

    # --- places ---

    def _place(self, course: Course) -> None:
        place = self._places.prompt(course.ask, len(course.ask.tokens) + len(course.ask.generated) + len(course.told))
        if place is not None:
            self._begin(course, place)
        elif self._hopeless or not self.rules.wait_s:
            self._nobody(course)
        else:
            course.since = self._now()
            self._waiting[course.ask.handle] = course

    def _nobody(self, course: Course) -> None:
        self._end(course, "error", self._hopeless or f"no engine is up ({self._last_words})", unavailable=True)

    def _begin(self, course: Course, place: Place, handed: Handed | None = None) -> None:
        generated = course.generated
        tokens = len(course.ask.tokens) + len(generated)
        one = Try(next(self._handles), course, place.engine, tokens, place.missed)
        course.at, course.handed = one, handed
        self._tries[one.handle] = one
        one.charge()
        self.counts["placed"] += 1
        handoff = None if handed is None else handed.handoff
        how = {"handle": one.handle, "generated": generated, "hand_over": place.parts, "handoff": handoff}
        self._to_engine(place.engine.name, replace(course.ask, **how))

    def _leave(self, course: Course) -> None:
        course.at.discharge()
        del self._tries[course.at.handle]
        course.at = None

    def _drop_lender(self, course: Course) -> None:
        del self._tries[course.lender.handle]
        course.lender = None

    # --- from engines ---

    def deliver(self, name: str, outputs: Outputs) -> None:
        """What an engine told, handed on under the front end's handles; what nobody asked for is dropped, and an engine
        that works for nobody is told to stop."""
        member = self.fleet[name]
        if not member.alive:
            return
        if outputs.stats:
            member.stats = outputs.stats
        told = self._told(member, outputs)
        if told:
            self._to_front(told)
        for handed in outputs.handed:
            one = self._current(member, handed.handle)
            if one is not None:
                self._hand_over(one, handed)

    def _told(self, member: Member, outputs: Outputs) -> Outputs:
        handles, counts, tokens, logprobs, prompts = [], [], [], {}, {}
        for handle, rows in outputs.prompt_logprobs.items():
            one = self._current(member, handle)
            rows = None if one is None else one.fresh(rows)
            if rows is not None:
                prompts[one.course.ask.handle] = rows
        for handle, new, rows in outputs.each():
            one = self._current(member, handle)
            if one is None:
                continue
            course = one.course
            one.computed()
            course.told += new
            handles.append(course.ask.handle)
            counts.append(len(new))
            tokens += new
            if rows is not None:
                logprobs[course.ask.handle] = rows
        arrays = np.array(handles, np.int64), np.array(counts, np.int32), np.array(tokens, np.int32)
        return Outputs(*arrays, logprobs, prompts, self._finished(member, outputs.finished))

    def _finished(self, member: Member, finishes: Sequence[Finish]) -> list[Finish]:
        out = []
        for finish in finishes:
            one = self._tries.get(finish.handle)
            if one is None or one.engine is not member or one.course.at is not one:
                continue
            course = one.course
            first = course.handed or finish  # the prompt was looked up there
            cached = min(first.cached_tokens, len(course.ask.tokens))  # not what it generated at an earlier try
            replayed = min(first.replayed_tokens, cached)
            self._close(course)
            out.append(replace(finish, handle=course.ask.handle, cached_tokens=cached, replayed_tokens=replayed))
        return out

    def _current(self, member: Member, handle: int) -> Try | None:
        """The try that the engine speaks of, None if it is over. One that was never ours is told to stop."""
        one = self._tries.get(handle)
        if one is None or one.engine is not member:
            self.counts["strangers"] += 1
            self._to_engine(member.name, Abort(handle))
            return None
        return one if one.course.at is one else None

    def _hand_over(self, one: Try, handed: Handed) -> None:
        course = one.course
        one.discharge()
        course.at = None
        place = None if course.aborted else self._places.decode(course.ask)
        if place is not None:
            course.lender = one
            self.counts["handed"] += 1
            self._begin(course, place, handed)
            return
        del self._tries[one.handle]
        if course.aborted:  # the engine revokes it when it sees the abort, and says no more
            self._end(course, "abort")
        else:
            self._to_engine(one.engine.name, Abort(one.handle))
            self._place(course)

    # --- the end of a request ---

    def _close(self, course: Course) -> None:
        if course.at is not None:
            self._leave(course)
        if course.lender is not None:
            self._drop_lender(course)
        self._waiting.pop(course.ask.handle, None)
        del self._courses[course.ask.handle]

    def _end(self, course: Course, reason: str, message: str = "", unavailable: bool = False) -> None:
        self._close(course)
        cost = (0, 0) if course.handed is None else (course.handed.cached_tokens, course.handed.replayed_tokens)
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32)
        finish = Finish(course.ask.handle, reason, *cost, message, unavailable)
        self._to_front(Outputs(*nothing, finished=[finish]))

    # --- figures ---

    @property
    def open(self) -> int:
        return len(self._courses)

    def stats(self) -> dict[str, float]:
        """The engines' sums, and the router's own counters and gauges."""
        own = {f"router_{name}_total": value for name, value in self.counts.items()}
        return {**self.fleet.sums(), **own, "router_waiting": len(self._waiting)}

    def check(self) -> None:
        """Assert that every table holds what the open requests need, and nothing else."""
        want, charges = {}, {m.name: [0, 0, 0] for m in self.fleet}
        for handle, course in self._courses.items():
            assert course.ask.handle == handle and (course.at is None) == (handle in self._waiting)
            for one in (course.at, course.lender):
                if one is not None:
                    assert one.engine.alive and one.course is course
                    want[one.handle] = one
            if course.at is not None:
                for i, value in enumerate((1, course.at.tokens, course.at.prompt)):
                    charges[course.at.engine.name][i] += value
        assert want == self._tries and self._waiting.keys() <= self._courses.keys()
        for m in self.fleet:
            assert [m.requests, m.tokens, m.prompt] == charges[m.name], m.name
        places = self._places
        assert len(places.sent) <= self.rules.pages
        assert max(len(places.prefills), len(places.decodes)) <= self.rules.sessions
