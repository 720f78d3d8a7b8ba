"""Prometheus text for /metrics: the front end's requests and latencies, and the engine's own gauges and counters."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
PREFIX = "racklab_"


class Metrics:
    """Told by the front end (`began`, `came`, `ended`) and the HTTP server (`answered`). Seconds are elapsed ones."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Completions ended, by reason", ("finish",))
        self._answers = self._counter("http_responses", "HTTP responses", ("path", "status"))
        self._prompt = self._counter("prompt_tokens", "Tokens of accepted prompts")
        self._cached = self._counter("cached_tokens", "Prompt tokens found in the prefix cache")
        self._completion = self._counter("completion_tokens", "Tokens of completions")
        self._ttft = self._histogram("ttft_seconds", "Time to the first token", TTFT_S)
        self._itl = self._histogram("itl_seconds", "Time between tokens", ITL_S)
        self._whole = self._histogram("request_seconds", "Time to the last token", TTFT_S)
        self._open = Gauge(f"{PREFIX}open", "Completions under way", registry=self._registry)
        self._waiting = Gauge(f"{PREFIX}waiting", "Completions without a first token", registry=self._registry)
        self._engine = EngineStats()
        self._registry.register(self._engine)
        self.totals = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "completion_tokens"), 0)
        self.finishes: dict[str, int] = {}

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, about, buckets=buckets, registry=self._registry)

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
        self._requests.labels(reason).inc()
        self._completion.inc(tokens)
        self._cached.inc(cached_tokens)
        self._whole.observe(seconds)
        self.totals["completion_tokens"] += tokens
        self.totals["cached_tokens"] += cached_tokens
        self.finishes[reason] = self.finishes.get(reason, 0) + 1

    def answered(self, path: str, status: int) -> None:
        """``path`` is a route's, not what was asked for: labels must be few."""
        self._answers.labels(path, str(status)).inc()

    def render(self, open_: int, waiting: int, stats: dict[str, float]) -> bytes:
        """The text; ``stats`` are the engine's latest."""
        self._open.set(open_)
        self._waiting.set(waiting)
        self._engine.stats = stats
        return generate_latest(self._registry)


class EngineStats:
    """``engine_NAME`` for each of the engine's stats: a counter if the name ends with ``_total``, else a gauge."""

    def __init__(self):
        self.stats: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        for name, value in self.stats.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"{PREFIX}engine_{name}", f"The engine's {name}", value=value)
