"""OpenTelemetry traces of requests: one server span each, with a child for every phase of its life.

Spans are made after the fact, when a request has ended, from times that were taken anyway. The SDK's own
thread sends them; a collector that is slow or gone costs traces, never requests.
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atom.errors import ConfigError
from atom.utils import envs
from atom.utils.logging import init_logger

logger = init_logger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
SERVICE_NAME = "OTEL_SERVICE_NAME"
DEFAULT_SERVICE_NAME = "atom"
FLUSH_TIMEOUT_S = 2.0


@dataclass(slots=True)
class RequestTrace:
    """One request that has ended. Times are ``time.monotonic()``.

    ``carrier`` holds the client's ``traceparent`` and ``tracestate``; ``phases`` are (name, start, end).
    """

    name: str
    start: float
    end: float
    carrier: Mapping[str, str] = field(default_factory=dict)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # what went wrong on this side


class RequestTracer:
    """Owns the SDK's provider. ``record`` may be called from one thread, for example an event loop's.

    Raises:
        ConfigError: the OpenTelemetry packages or the endpoint are missing.
    """

    def __init__(self) -> None:
        endpoint = os.environ.get(ENDPOINT, "").strip()
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"ATOM_ENABLE_OTEL_TRACE needs {ENDPOINT}, the URL of an OTLP/HTTP collector such as "
                f"http://localhost:4318/v1/traces, got {endpoint!r}"
            )
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"ATOM_ENABLE_OTEL_TRACE needs the OpenTelemetry packages (pip install "
                f"'atom-inference-engine[tracing]'): {error}"
            ) from None
        names = {"atom.version": envs.ATOM_TRACE_VERSION}
        if not os.environ.get(SERVICE_NAME, "").strip():
            names["service.name"] = DEFAULT_SERVICE_NAME
        # Not the global provider: this process may hold other libraries with traces of their own.
        self._provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("atom")
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._has_failed = False
        logger.info("traces of requests go to %s", endpoint)

    def record(self, request: RequestTrace) -> None:
        """Hand the spans of one request to the exporter. Never raises."""
        try:
            self._record(request)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("a trace could not be made (said once)")

    def _record(self, request: RequestTrace) -> None:
        trace = self._trace
        offset_ns = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + offset_ns

        span = self._tracer.start_span(
            request.name,
            context=self._propagator.extract(request.carrier),
            kind=trace.SpanKind.SERVER,
            attributes=request.attributes,
            start_time=at(request.start),
        )
        if span.is_recording():
            if request.error is not None:
                span.set_status(trace.Status(trace.StatusCode.ERROR, request.error))
            context = trace.set_span_in_context(span)
            for name, start, end in request.phases:
                child = self._tracer.start_span(name, context=context, start_time=at(start))
                child.end(at(max(start, end)))
        span.end(at(request.end))

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        # The SDK's own shutdown tries a dead collector again for longer than anyone wants to wait.
        flush = threading.Thread(target=self._provider.shutdown, name="trace-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_TIMEOUT_S)
        if flush.is_alive():
            logger.warning("traces of the last requests are lost: the collector does not answer")


def make_tracer() -> RequestTracer | None:
    """The tracer that ``ATOM_ENABLE_OTEL_TRACE`` asks for; None when it does not. Raises ConfigError."""
    return RequestTracer() if envs.ATOM_ENABLE_OTEL_TRACE else None
