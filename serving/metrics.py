"""What the server counts and times, in Prometheus's text format, under the names that users of other engines know."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .asks import Ask, Ended, Sampled
from .engine import EngineStatus
from .protocol_run import Submits, TokenStream

__all__ = ["MeasuredEngine", "Metrics"]

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150)
"""Upper ends of the classes of times: from a step of a tiny model to a long prompt's."""

_COUNTERS: Final = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts taken in."),
    "cached_tokens": ("prefix_cache_hits", "Prompt tokens that were taken over from earlier requests."),
    "generated_tokens": ("generation_tokens", "Tokens sampled."),
    "steps": ("engine_steps", "Steps made."),
    "compiled_steps": ("engine_compiled_steps", "Steps made in compiled graphs."),
    "fed_tokens": ("engine_fed_tokens", "Tokens that steps fed."),
    "retractions": ("num_preemptions", "Running requests that had to give their pages back and wait."),
    "aborts": ("request_aborts", "Generations that were cancelled."),
    "repetitions": ("repetitive_replies", "Generations that ended in one block of tokens again and again."),
}
"""Counter of the engine -> (name, meaning)."""


class HasStatus(Protocol):
    """Whatever says what it is doing."""

    def status(self) -> EngineStatus: ...


class Metrics:
    """All metrics of one server.

    Args:
        engine: whose status is shown.
    """

    def __init__(self, engine: HasStatus) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        options: dict[str, Any] = {"namespace": "purestep", "registry": self._registry}
        timed = options | {"buckets": _SECONDS}
        self.first_token = Histogram("time_to_first_token_seconds", "From a request to its first token.", **timed)
        self.inter_token = Histogram("inter_token_latency_seconds", "From a token to the next.", **timed)
        self.whole = Histogram("e2e_request_latency_seconds", "From a generation's request to its end.", **timed)
        self.answered = Counter("http_requests", "Requests answered.", ["path", "status"], **options)

    def text(self) -> bytes:
        """Write everything in Prometheus's text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's status when metrics are asked for."""

    def __init__(self, engine: HasStatus) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        status = self._engine.status()
        yield GaugeMetricFamily("purestep_num_requests_running", "Requests that own rows.", status.running)
        yield GaugeMetricFamily("purestep_num_requests_waiting", "Requests that wait.", status.waiting)
        silent = status.seconds_since_progress or 0.0
        yield GaugeMetricFamily("purestep_seconds_since_progress", "While there is work; 0 when idle.", silent)
        for at, which in enumerate(("used", "total")):
            found = ((name, pool[at]) for name, pool in status.pools.items())
            yield _labelled(f"purestep_pool_pages_{which}", f"Pages or rows {which}.", "pool", found)
        yield _labelled("purestep_pool_bytes", "Bytes of a cache buffer.", "buffer", status.pool_bytes.items())
        for counter, (name, meaning) in _COUNTERS.items():
            yield CounterMetricFamily(f"purestep_{name}", meaning, status.counters.get(counter, 0))
        ended = CounterMetricFamily("purestep_request_success", "Generations that ended.", labels=["finished_reason"])
        for counter, number in status.counters.items():
            if counter.startswith("finished_"):
                ended.add_metric([counter.removeprefix("finished_")], number)
        yield ended


def _labelled(name: str, meaning: str, label: str, found: Iterable[tuple[str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for key, number in found:
        family.add_metric([key], number)
    return family


class MeasuredEngine:
    """An engine whose streams are timed.

    Args:
        engine: that generates.
        metrics: take the times.
    """

    def __init__(self, engine: Submits, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def submit(self, ask: Ask) -> TokenStream:
        """Ask for a generation and time it from now on."""
        return _MeasuredStream(self._engine.submit(ask), self._metrics)


class _MeasuredStream:
    def __init__(self, stream: TokenStream, metrics: Metrics) -> None:
        self._stream = stream
        self._metrics = metrics
        self._began = time.monotonic()

    def cancel(self) -> None:
        self._stream.cancel()

    def finish(self) -> None:
        self._stream.finish()

    async def __aiter__(self) -> AsyncIterator[Sampled | Ended]:
        last: float | None = None
        async for event in self._stream:
            now = time.monotonic()
            if isinstance(event, Ended):
                self._metrics.whole.observe(now - self._began)
            elif last is None:
                self._metrics.first_token.observe(now - self._began)
            else:
                self._metrics.inter_token.observe(now - last)
            last = now
            yield event
