"""Prometheus metrics: what the engine last said of itself, and what this server measured.

A scrape never asks the engine. It reads the newest snapshot, which is renewed at most once per
``ATOM_METRICS_UPDATE_INTERVAL_S``; a failure to renew it is counted and the old one stays.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from atom.entrypoints.openai.metric_names import (
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    ENGINE_HISTOGRAMS,
    ENGINE_STATES,
    PREFIX,
    PROCESS_METRICS,
    SERVER_METRICS,
)
from atom.entrypoints.openai.request_observer import RequestObserver, RequestTallies
from atom.runtime.histogram import unflatten
from atom.runtime.process_stats import process_tree
from atom.sampling_params import SamplingParams
from atom.utils import envs

logger = logging.getLogger("atom.server")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
        self._num_rejected = 0
        self.num_log_lines_dropped: Callable[[], int] = lambda: 0
        self.tallies = RequestTallies()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def observe_request(
        self, arrival: float, is_streamed: bool, answer_id: str, params: SamplingParams
    ) -> RequestObserver:
        """Measures one HTTP request that arrived at ``arrival`` (``time.monotonic()``)."""
        return RequestObserver(self.tallies, arrival, is_streamed, answer_id, params)

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
            self._count_error("the engine's snapshot could not be read")

    def _count_error(self, what: str) -> None:
        self._num_refresh_errors += 1
        if self._num_refresh_errors == 1:
            logger.exception("metrics: %s (said once)", what)

    def render(self) -> bytes:
        """The text format. Takes a few milliseconds: may run in a thread."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry: every metric, from memory. A part that fails is left out and counted."""
        for part in (self._engine, self._requests, self._process, self._server):
            try:
                yield from list(part())
            except Exception:
                self._count_error(f"{part.__name__} could not be told")

    def _engine(self) -> Iterator[Metric]:
        stats = self._snapshot.stats
        for table, family in ((ENGINE_GAUGES, GaugeMetricFamily), (ENGINE_COUNTERS, CounterMetricFamily)):
            for name, meaning in table.items():
                if name in stats:
                    yield family(PREFIX + name, meaning, value=float(stats[name]))
        for name, meaning in ENGINE_HISTOGRAMS.items():
            found = unflatten(name, stats)
            if found is not None:
                metric = HistogramMetricFamily(PREFIX + name, meaning, labels=[])
                metric.add_metric([], *found)
                yield metric
        for name, states in ENGINE_STATES.items():
            metric = GaugeMetricFamily(PREFIX + name, "The same counts by state", labels=["state"])
            for state, key in states.items():
                if key in stats:
                    metric.add_metric([state], float(stats[key]))
                elif not key and "kv_cache_blocks_evictable" in stats:
                    vacant = stats["kv_cache_blocks_free"] - stats["kv_cache_blocks_evictable"]
                    metric.add_metric([state], float(vacant))
            yield metric

    def _requests(self) -> Iterator[Metric]:
        tallies = self.tallies
        name = "requests_finished"
        finished = CounterMetricFamily(PREFIX + name, SERVER_METRICS[name], labels=["finished_reason"])
        for reason, count in list(tallies.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield self._counter("prompt_tokens", tallies.num_prompt_tokens)
        yield self._counter("generation_tokens", tallies.num_generation_tokens)
        yield self._gauge("stream_longest_silence_seconds", tallies.longest_silence_s(time.monotonic()))
        name = "time_to_first_token_seconds"
        ttft = HistogramMetricFamily(PREFIX + name, SERVER_METRICS[name], labels=["streaming"])
        for value, histogram in tallies.ttft.items():
            ttft.add_metric([value], *histogram.buckets())
        yield ttft
        for name, histogram in tallies.histograms.items():
            metric = HistogramMetricFamily(PREFIX + name, SERVER_METRICS[name], labels=[])
            metric.add_metric([], *histogram.buckets())
            yield metric

    def _process(self) -> Iterator[Metric]:
        """O(1) reads only: what walks the heap is in ``/debug/gc_census``."""
        generations = list(enumerate(zip(gc.get_stats(), gc.get_threshold(), strict=True)))
        for key in ("collections", "collected", "uncollectable"):
            name = f"gc_{key}"
            counter = CounterMetricFamily(PREFIX + name, PROCESS_METRICS[name], labels=["generation"])
            for generation, (stats, _) in generations:
                counter.add_metric([str(generation)], stats[key])
            yield counter
        name = "gc_threshold"
        thresholds = GaugeMetricFamily(PREFIX + name, PROCESS_METRICS[name], labels=["generation"])
        for generation, (_, threshold) in generations:
            thresholds.add_metric([str(generation)], threshold)
        yield thresholds
        name = "process_cpu_seconds"
        cpu = CounterMetricFamily(PREFIX + name, PROCESS_METRICS[name], labels=["process", "mode"])
        name = "process_threads"
        threads = GaugeMetricFamily(PREFIX + name, PROCESS_METRICS[name], labels=["process"])
        by_name: dict[str, tuple[float, float, int]] = {}
        for process in process_tree("server"):
            user, system, number = by_name.get(process.name, (0.0, 0.0, 0))
            by_name[process.name] = (
                user + process.user_s,
                system + process.system_s,
                number + process.num_threads,
            )
        for process_name, (user, system, number) in by_name.items():
            cpu.add_metric([process_name, "user"], user)
            cpu.add_metric([process_name, "system"], system)
            threads.add_metric([process_name], number)
        yield cpu
        yield threads

    def _server(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield self._gauge("metrics_snapshot_available", float(snapshot.taken_at > 0))
        yield self._gauge("metrics_last_refresh_timestamp_seconds", snapshot.taken_at)
        yield self._gauge("engine_up", float(snapshot.is_up))
        yield self._gauge("engine_heartbeat_age_seconds", snapshot.heartbeat_age_s)
        yield self._gauge("http_requests_in_flight", self._num_in_flight())
        yield self._counter("requests_rejected", self._num_rejected)
        yield self._counter("request_log_dropped", self.num_log_lines_dropped())
        yield self._counter("metrics_refresh_errors", self._num_refresh_errors)
        name = "startup_phase_seconds"
        phases = GaugeMetricFamily(PREFIX + name, SERVER_METRICS[name], labels=["phase"])
        for phase, seconds in snapshot.phases.items():
            phases.add_metric([phase], seconds)
        yield phases

    def _gauge(self, name: str, value: float) -> Metric:
        return GaugeMetricFamily(PREFIX + name, SERVER_METRICS[name], value=value)

    def _counter(self, name: str, value: float) -> Metric:
        return CounterMetricFamily(PREFIX + name, SERVER_METRICS[name], value=value)
