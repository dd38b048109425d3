"""Prometheus metrics: what the engine last said of itself, and what this server measured.

A scrape never asks the engine. It reads the newest snapshot, which is renewed at most once per
``ATOM_METRICS_UPDATE_INTERVAL_S``; a failure to renew it is counted and the old one stays.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from atom.model_engine.outputs import RequestOutput
from atom.utils import envs

logger = logging.getLogger("atom.server")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "atom:"

# Key of LLMEngine.stats(), and its meaning. What the engine does not report is left out.
ENGINE_GAUGES = {
    "requests_running": "Requests that have a row in the engine",
    "requests_waiting": "Requests that wait for admission",
    "requests_partial_prefill": "Running requests whose prompt is not computed to its end",
    "requests_parked_kv_load": "Requests that wait for KV from elsewhere",
    "kv_cache_blocks_used": "KV cache blocks held by requests",
    "kv_cache_blocks_free": "KV cache blocks that can be given out, reusable ones included",
    "kv_cache_blocks_total": "KV cache blocks of all cache groups",
    "kv_cache_blocks_indexed": "KV cache blocks that a prefix lookup can find",
    "kv_cache_usage_ratio": "Used share of the KV cache",
    "prefix_cache_hit_ratio": "Share of prompt tokens found in the prefix cache since the start",
}
ENGINE_COUNTERS = {
    "preemptions": "Requests put back to the queue because the KV cache was full",
    "prefix_cache_cached_tokens": "Prompt tokens found in the prefix cache",
    "prefix_cache_full_tokens": "Prompt tokens looked up in the prefix cache",
    "engine_steps": "Steps of the engine",
    "cache_integrity_faults": "Faults found, and repaired, in the books over cache blocks",
}
SERVER_METRICS = {
    "requests_finished": "Answers that ended, by finish reason (abort: the client left or the server stopped)",
    "requests_rejected": "Requests refused because the queue was full (HTTP 429)",
    "prompt_tokens": "Prompt tokens of finished requests",
    "generation_tokens": "Tokens of finished answers",
    "time_to_first_token_seconds": "Arrival of a request to its first token",
    "inter_token_latency_seconds": "Time between tokens of one answer, each token counted",
    "request_queue_time_seconds": "Arrival of a request at the engine to its first forward pass",
    "http_requests_in_flight": "Generation requests that are being answered",
    "startup_phase_seconds": "Duration of each start-up phase",
    "engine_heartbeat_age_seconds": "Time since the engine last gave a sign of life",
    "engine_up": "Whether the engine is able to serve (0/1)",
    "metrics_snapshot_available": "Whether the engine has reported yet (0/1)",
    "metrics_last_refresh_timestamp_seconds": "Unix time of the newest snapshot",
    "metrics_refresh_errors": "Snapshots that could not be read",
}

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Histogram:
    """Bucket counts and a sum; one writer. ``weight`` counts an observation that many times."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._sum


@dataclass(frozen=True)
class EngineSnapshot:
    """What a scrape shows of the engine."""

    stats: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    is_up: bool = False
    heartbeat_age_s: float = 0.0
    taken_at: float = 0.0  # unix time; 0: never


class ServerMetrics:
    """Owns the registry. Everything but ``render`` belongs to the event loop.

    Args:
        read_engine: the engine's state of now, without asking its process; may raise.
        num_in_flight: how many generation requests are being answered.
    """

    def __init__(self, read_engine: Callable[[], EngineSnapshot], num_in_flight: Callable[[], int]):
        self._read_engine = read_engine
        self._num_in_flight = num_in_flight
        self._interval_s: float = envs.ATOM_METRICS_UPDATE_INTERVAL_S
        self._snapshot = EngineSnapshot()
        self._tried_at = float("-inf")
        self._num_refresh_errors = 0
        self._finished: dict[str, int] = {}
        self._num_rejected = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._ttft = {"true": Histogram(_TTFT_BUCKETS), "false": Histogram(_TTFT_BUCKETS)}
        self._itl = Histogram(_ITL_BUCKETS)
        self._queue_time = Histogram(_QUEUE_BUCKETS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe_request(self, arrival: float, is_streamed: bool) -> "RequestObserver":
        """Measures one HTTP request that arrived at ``arrival`` (``time.monotonic()``)."""
        return RequestObserver(self, arrival, is_streamed)

    def count_rejected(self) -> None:
        self._num_rejected += 1

    def refresh(self) -> None:
        """Renew the snapshot if it is older than the interval. Never raises."""
        now = time.monotonic()
        if now - self._tried_at < self._interval_s:
            return
        self._tried_at = now
        try:
            self._snapshot = self._read_engine()
        except Exception:
            self._num_refresh_errors += 1
            if self._num_refresh_errors == 1:
                logger.exception("metrics: the engine's snapshot could not be read")

    def render(self) -> bytes:
        """The text format. Takes a few milliseconds: may run in a thread."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry: every metric, from memory."""
        snapshot = self._snapshot
        for table, family in ((ENGINE_GAUGES, GaugeMetricFamily), (ENGINE_COUNTERS, CounterMetricFamily)):
            for name, meaning in table.items():
                if name in snapshot.stats:
                    yield family(PREFIX + name, meaning, value=float(snapshot.stats[name]))
        yield self._gauge("metrics_snapshot_available", float(snapshot.taken_at > 0))
        yield self._gauge("metrics_last_refresh_timestamp_seconds", snapshot.taken_at)
        yield self._counter("metrics_refresh_errors", self._num_refresh_errors)
        yield self._gauge("engine_up", float(snapshot.is_up))
        yield self._gauge("engine_heartbeat_age_seconds", snapshot.heartbeat_age_s)
        yield self._gauge("http_requests_in_flight", self._num_in_flight())
        name = "startup_phase_seconds"
        phases = GaugeMetricFamily(PREFIX + name, SERVER_METRICS[name], labels=["phase"])
        for phase, seconds in snapshot.phases.items():
            phases.add_metric([phase], seconds)
        yield phases
        name = "requests_finished"
        finished = CounterMetricFamily(PREFIX + name, SERVER_METRICS[name], labels=["finished_reason"])
        for reason, count in list(self._finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield self._counter("requests_rejected", self._num_rejected)
        yield self._counter("prompt_tokens", self._num_prompt_tokens)
        yield self._counter("generation_tokens", self._num_generation_tokens)
        yield self._histograms("time_to_first_token_seconds", self._ttft, "streaming")
        yield self._histograms("inter_token_latency_seconds", {"": self._itl})
        yield self._histograms("request_queue_time_seconds", {"": self._queue_time})

    def _gauge(self, name: str, value: float) -> Metric:
        return GaugeMetricFamily(PREFIX + name, SERVER_METRICS[name], value=value)

    def _counter(self, name: str, value: float) -> Metric:
        return CounterMetricFamily(PREFIX + name, SERVER_METRICS[name], value=value)

    def _histograms(self, name: str, by_label: dict[str, Histogram], label: str | None = None) -> Metric:
        labels = [label] if label else []
        metric = HistogramMetricFamily(PREFIX + name, SERVER_METRICS[name], labels=labels)
        for value, histogram in by_label.items():
            buckets, total = histogram.buckets()
            metric.add_metric([value] if label else [], buckets, total)
        return metric


class RequestObserver:
    """Times and counts of one HTTP request; one call a delta, so it stays small."""

    __slots__ = ("_metrics", "_arrival", "_is_streamed", "_last")

    def __init__(self, metrics: ServerMetrics, arrival: float, is_streamed: bool):
        self._metrics = metrics
        self._arrival = arrival
        self._is_streamed = is_streamed
        self._last: dict[int, float] = {}  # answer -> when its last tokens came

    def delta(self, output: RequestOutput, num_prompt_tokens: int, now: float) -> None:
        """``num_prompt_tokens``: what finishing this answer adds to the count of prompt tokens."""
        metrics = self._metrics
        num_tokens = len(output.output_tokens)
        if num_tokens:
            last = self._last.get(output.index)
            if last is not None:
                metrics._itl.observe((now - last) / num_tokens, num_tokens)
            elif not self._last:
                metrics._ttft["true" if self._is_streamed else "false"].observe(now - self._arrival)
            self._last[output.index] = now
        if output.queue_time_s is not None:
            metrics._queue_time.observe(output.queue_time_s)
        if output.finished:
            self._count(output.finish_reason or "stop", 1)
            metrics._num_prompt_tokens += num_prompt_tokens
            metrics._num_generation_tokens += output.num_output_tokens

    def close(self, num_aborted: int) -> None:
        """The request ended; ``num_aborted`` answers of it did not finish."""
        if num_aborted:
            self._count("abort", num_aborted)

    def _count(self, reason: str, number: int) -> None:
        finished = self._metrics._finished
        finished[reason] = finished.get(reason, 0) + number
