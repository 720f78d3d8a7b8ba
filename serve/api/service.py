"""What the HTTP server serves: models, each with its front end, and the limits that are the same for all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve.api.body import ApiError
from serve.front import Front
from serve.metrics import Metrics, ModelMetrics, Seen


@dataclass(frozen=True)
class Ports:
    """What `serve/` does not make itself."""

    now: Callable[[], float]  # seconds since the epoch
    new_id: Callable[[], str]
    seed: Callable[[], int]  # for a request that names none


@dataclass(frozen=True)
class Behind:
    """What stands behind a front end, as far as one can ask: `scripts/serving/pool.py`."""

    groups: Callable[[], dict[str, str]] = dict  # engines that live and die together -> up, starting, down or gone
    engines: Callable[[], dict[str, dict[str, float]]] = dict  # figures of each engine
    all: Callable[[], dict[str, float]] = dict  # of all together
    pause: Callable[[bool], None] = lambda on: None  # or go on


@dataclass(frozen=True)
class Offer:
    """A model that is served. ``text`` is its tokenizer."""

    name: str
    front: Front
    text: Any
    metrics: ModelMetrics
    behind: Behind = Behind()

    def seen(self) -> Seen:
        return Seen(self.name, self.front.open, self.front.waiting, self.behind.engines(), self.behind.all())

    def health(self) -> dict:
        groups = self.behind.groups()
        status = self.front.closed or ("ok" if all(state == "up" for state in groups.values()) else "degraded")
        return {"status": status, "open": self.front.open, "waiting": self.front.waiting, "groups": groups}


@dataclass(frozen=True)
class Service:
    """What the server serves. The first model is that of requests which name none; ``key`` None lets everybody in."""

    offers: tuple[Offer, ...]
    metrics: Metrics
    ports: Ports
    key: str | None = None
    max_body_bytes: int = 32 << 20
    body_timeout_s: float = 60.0
    chat_tokens: int = 1024  # of a chat completion that names no limit

    def offer(self, name: str | None) -> Offer:
        """The model of that name. Raises ApiError if there is none."""
        for offer in self.offers:
            if name is None or offer.name == name:
                return offer
        known = ", ".join(repr(o.name) for o in self.offers)
        raise ApiError(404, f"no model {name!r}; this server has {known}", "model", "model_not_found")

    def health(self) -> dict:
        """Of all models; ``degraded``: some engines are not there, and the others serve."""
        models = {offer.name: offer.health() for offer in self.offers}
        states = list(dict.fromkeys(m["status"] for m in models.values()))
        closed = all(offer.front.closed for offer in self.offers)
        sums = {name: sum(m[name] for m in models.values()) for name in ("open", "waiting")}
        return {"status": states[0] if closed or len(states) == 1 else "degraded", **sums, "models": models}
