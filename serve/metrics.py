"""Prometheus text for /metrics: requests and latencies by model, and the figures of each of its engines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
PREFIX = "racklab_"
MODEL = ("model",)


@dataclass(frozen=True)
class Seen:
    """A model at the time of asking. ``engines``: the latest figures by engine; ``all``: of all together, those of
    engines that are gone included in counters."""

    model: str
    open: int
    waiting: int
    engines: dict[str, dict[str, float]] = field(default_factory=dict)
    all: dict[str, float] = field(default_factory=dict)


class Metrics:
    """Told by the front ends (`model`) and the HTTP server (`answered`)."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Completions ended, by reason", ("finish", "model"))
        self._answers = self._counter("http_responses", "HTTP responses", ("path", "status"))
        self.prompt = self._counter("prompt_tokens", "Tokens of accepted prompts")
        self.cached = self._counter("cached_tokens", "Prompt tokens found in the prefix cache")
        self.completion = self._counter("completion_tokens", "Tokens of completions")
        self.ttft = self._histogram("ttft_seconds", "Time to the first token", TTFT_S)
        self.itl = self._histogram("itl_seconds", "Time between tokens", ITL_S)
        self.whole = self._histogram("request_seconds", "Time to the last token", TTFT_S)
        self._open = Gauge(f"{PREFIX}open", "Completions under way", MODEL, registry=self._registry)
        self._waiting = Gauge(f"{PREFIX}waiting", "Completions without a first token", MODEL, registry=self._registry)
        self._engines = EngineFigures()
        self._registry.register(self._engines)

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = MODEL) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, about, MODEL, buckets=buckets, registry=self._registry)

    def model(self, name: str) -> "ModelMetrics":
        return ModelMetrics(self, name)

    def answered(self, path: str, status: int) -> None:
        """``path`` is a route's, not what was asked for: labels must be few."""
        self._answers.labels(path, str(status)).inc()

    def render(self, models: Sequence[Seen]) -> bytes:
        """The text."""
        for one in models:
            self._open.labels(one.model).set(one.open)
            self._waiting.labels(one.model).set(one.waiting)
        self._engines.models = models
        return generate_latest(self._registry)


class ModelMetrics:
    """Told by a model's front end. Seconds are elapsed ones; ``totals`` and ``finishes`` are for the result line."""

    def __init__(self, metrics: Metrics, name: str):
        self._requests, self._name = metrics.requests, name
        families = metrics.prompt, metrics.cached, metrics.completion, metrics.ttft, metrics.itl, metrics.whole
        of_model = (family.labels(name) for family in families)
        self._prompt, self._cached, self._completion, self._ttft, self._itl, self._whole = of_model
        self.totals = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "completion_tokens"), 0)
        self.finishes: dict[str, int] = {}

    def began(self, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)
        self.totals["requests"] += 1
        self.totals["prompt_tokens"] += prompt_tokens

    def came(self, seconds: float, tokens: int, first: bool) -> None:
        """``tokens`` came together, ``seconds`` after those before them, or after the request."""
        if first:
            self._ttft.observe(seconds)
        else:
            for _ in range(tokens):
                self._itl.observe(seconds / tokens)

    def ended(self, reason: str, tokens: int, cached_tokens: int, seconds: float) -> None:
        self._requests.labels(reason, self._name).inc()
        self._completion.inc(tokens)
        self._cached.inc(cached_tokens)
        self._whole.observe(seconds)
        self.totals["completion_tokens"] += tokens
        self.totals["cached_tokens"] += cached_tokens
        self.finishes[reason] = self.finishes.get(reason, 0) + 1


class EngineFigures:
    """``engine_NAME`` of each engine, ``engines_NAME`` of all of a model together; a counter if the name ends with
    ``_total``, else a gauge."""

    def __init__(self):
        self.models: Sequence[Seen] = ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for one in self.models:
            for engine, stats in one.engines.items():
                for name, value in stats.items():
                    family = self._family(families, f"engine_{name}", ("model", "engine"))
                    family.add_metric((one.model, engine), value)
            for name, value in one.all.items():
                self._family(families, f"engines_{name}", MODEL).add_metric((one.model,), value)
        yield from families.values()

    @staticmethod
    def _family(families: dict[str, Metric], name: str, labels: tuple[str, ...]) -> Metric:
        if name not in families:
            cls = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = cls(PREFIX + name, name.replace("_", " "), labels=labels)
        return families[name]
