"""Which engine: what `serve.router` in the config says, and its policies. A policy orders engines, and the one with the
smallest key gets the request.

`key(engine, missed, rules)`: ``missed`` are the prompt's tokens that, as far as is known, it would have to compute. The
first number of a key is what a session's engine may be worse by. A new policy is a function here and its line in
POLICIES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve.router.fleet import Member


@dataclass(frozen=True)
class RouterRules:
    """Weights are in tokens of prompt: ``affinity_weight`` for each token that an engine would have to compute,
    ``request_tokens`` for each request it has open. A session stays where it was until that engine is ``slack_tokens``
    worse than the best. ``pages`` and ``sessions`` bound what is remembered.

    A request whose engine died is tried again ``retries`` times; one that no engine can take waits ``wait_s`` for one.
    """

    policy: str = "affinity"
    affinity_weight: float = 1.0
    request_tokens: int = 256
    slack_tokens: int = 2048
    pages: int = 65536
    sessions: int = 65536
    retries: int = 2
    wait_s: float = 180.0

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"serve.router.policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        for name in ("affinity_weight", "request_tokens", "slack_tokens", "retries", "wait_s"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"serve.router.{name} must be >= 0, got {getattr(self, name)}")
        for name in ("pages", "sessions"):
            if getattr(self, name) < 1:
                raise ValueError(f"serve.router.{name} must be >= 1, got {getattr(self, name)}")


Key = Callable[[Member, int, RouterRules], tuple]


def affinity(engine: Member, missed: int, rules: RouterRules) -> tuple:
    """Least prompt to compute before this request has its first token, its own included."""
    ahead = engine.prompt + rules.request_tokens * engine.requests
    return (ahead + rules.affinity_weight * missed, engine.sent)


def load(engine: Member, missed: int, rules: RouterRules) -> tuple:
    return (engine.tokens, engine.requests, engine.sent)


def turn(engine: Member, missed: int, rules: RouterRules) -> tuple:
    """The one that was sent the fewest requests."""
    return (engine.sent,)


# name -> who computes a prompt, who decodes what another computed, whether sessions stay where they were
POLICIES: dict[str, tuple[Key, Key, bool]] = {
    "affinity": (affinity, load, True),
    "load": (load, load, True),
    "round_robin": (turn, turn, False),
}


def best(engines: Sequence[Member], key: Callable[[Member], tuple], last: Member | None, slack: float) -> Member:
    """The engine with the smallest key, or ``last`` if it is one of them and at most ``slack`` worse."""
    first = min(engines, key=key)
    return last if last in engines and key(last)[0] <= key(first)[0] + slack else first
