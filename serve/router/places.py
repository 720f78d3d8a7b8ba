"""Where a request goes: the policy's choice among the engines that are up, with prefixes and sessions in mind."""

from dataclasses import dataclass
from functools import partial

from serve.request import Ask
from serve.router.choice import POLICIES, RouterRules, best
from serve.router.fleet import Fleet, Member
from serve.router.memory import Sent, Sessions


@dataclass(frozen=True)
class Place:
    """``missed``: tokens to compute there before the first one comes; ``parts``: another engine decodes it."""

    engine: Member
    missed: int
    parts: bool


class Places:
    """``page_size``: tokens of a page, of which an Ask has the hashes."""

    def __init__(self, rules: RouterRules, fleet: Fleet, page_size: int):
        self.rules, self.fleet, self.page_size = rules, fleet, page_size
        self._prompt_key, self._decode_key, self._sticky = POLICIES[rules.policy]
        self.sent = Sent(rules.pages)
        self.prefills, self.decodes = Sessions(rules.sessions), Sessions(rules.sessions)

    def prompt(self, ask: Ask, tokens: int) -> Place | None:
        """Where its ``tokens`` (prompt, and what was generated before) are computed; None if no engine is up."""
        engines = self.fleet.up("prefill", "both")
        parts = bool(self.fleet.up("decode", "both"))
        engines = engines or self.fleet.up("decode")
        if not engines:
            return None
        runs = self.sent.runs(ask.hashes)
        missed = lambda m: max(1, tokens - self.page_size * runs.get(m.index, 0))  # noqa: E731
        key = lambda m: self._prompt_key(m, missed(m), self.rules)  # noqa: E731
        engine = best(engines, key, self._last(self.prefills, ask), self.rules.slack_tokens)
        self.sent.add(ask.hashes, engine.index)
        self.prefills.put(ask.session, engine.name)
        return Place(engine, missed(engine), parts and engine.post.role == "prefill")

    def decode(self, ask: Ask) -> Place | None:
        """Where it goes on when its prompt is computed; None if no engine is up that may decode."""
        engines = self.fleet.up("decode", "both")
        if not engines:
            return None
        key = partial(self._decode_key, missed=0, rules=self.rules)
        engine = best(engines, key, self._last(self.decodes, ask), self.rules.slack_tokens)
        self.decodes.put(ask.session, engine.name)
        return Place(engine, 0, False)

    def _last(self, sessions: Sessions, ask: Ask) -> Member | None:
        name = sessions.get(ask.session) if self._sticky else None
        return None if name is None else self.fleet[name]

    def forget(self, group: str) -> None:
        """Its engines have lost their pages. Sessions find their new engines when they ask for the old ones."""
        for member in self.fleet.of(group):
            self.sent.forget(member.index)
