"""What is known of a request while it is answered, and who hears of it when it ends: log, request log, traces.

A :class:`RequestRecord` is made for each request that has a body. Code on the way finds it by
``current_record``, a context variable: nothing has to be handed through.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom.entrypoints.openai.http import header
from atom.entrypoints.openai.request_log import RequestLog, make_line
from atom.runtime.tracing import RequestTrace, RequestTracer
from atom.utils import envs
from atom.utils.logging import init_logger, log_request_id

if TYPE_CHECKING:
    from atom.entrypoints.openai.request_observer import RequestObserver

logger = init_logger("atom.server")

# gen_ai.operation.name by route. A path that is not here may hold anything, so it is not told.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
PROVIDER = "atom"
BODY_STAGE = "api_body_read"
WAIT_STAGE = "api_preprocess_wait"

T = TypeVar("T")

current_record: ContextVar["RequestRecord | None"] = ContextVar("current_record", default=None)


class RequestRecord:
    """One HTTP request. Times are ``time.monotonic()``."""

    __slots__ = (
        "request_id",
        "method",
        "path",
        "carrier",
        "arrival",
        "has_written_token",
        "status",
        "is_complete",
        "observer",
        "stages",
    )

    def __init__(self, scope: Scope):
        self.request_id: str = scope.get("request_id", "-")
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        names = (b"traceparent", b"tracestate")
        self.carrier = {n.decode(): value for n in names if (value := header(scope, n)) is not None}
        self.arrival = time.monotonic()
        self.has_written_token = False
        self.status = 0
        self.is_complete = False
        self.observer: RequestObserver | None = None  # of its generation, once there is one
        self.stages: dict[str, float] = {}  # seconds of each stage before the generation


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Add the time of the block to stage ``name`` of the request that is being answered."""
    record, began = current_record.get(), time.monotonic()
    try:
        yield
    finally:
        if record is not None:
            record.stages[name] = record.stages.get(name, 0.0) + time.monotonic() - began


async def run_staged(executor: Executor, work: Callable[[], T]) -> T:
    """Run ``work`` on ``executor`` for this request; the wait for a thread is a stage, and so is what it names."""
    submitted = time.monotonic()

    def run() -> T:
        record = current_record.get()
        if record is not None:
            record.stages[WAIT_STAGE] = record.stages.get(WAIT_STAGE, 0.0) + time.monotonic() - submitted
        return work()

    return await asyncio.get_running_loop().run_in_executor(executor, copy_context().run, run)


class TelemetryMiddleware:
    """Keeps a record of each request that has a body, and tells it when the request has ended.

    Args:
        model: name of the model in traces.
    """

    def __init__(
        self, app: ASGIApp, model: str, tracer: RequestTracer | None, request_log: RequestLog | None
    ):
        self._app = app
        self._model = model
        self._tracer = tracer
        self._log = request_log
        self._is_verbose: bool = envs.ATOM_LOG_MORE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope)
        if self._log is not None:
            receive, send = self._logged(record, receive, send)
        token, id_token = current_record.set(record), log_request_id.set(record.request_id)
        try:
            await self._app(scope, _timed(record, receive), _watched(record, send))
        finally:
            log_request_id.reset(id_token)
            current_record.reset(token)
            self._tell(record)

    def _logged(self, record: RequestRecord, receive: Receive, send: Send) -> tuple[Receive, Send]:
        log = self._log
        assert log is not None
        body: list[bytes] = []
        is_read = False
        status = 0

        async def receive_logged() -> Message:
            nonlocal is_read
            message = await receive()
            if message["type"] == "http.request" and not is_read:
                body.append(message.get("body", b""))
                if not message.get("more_body", False):
                    is_read = True
                    line = make_line(record.request_id, "request")
                    line.method, line.path = record.method, record.path
                    log.put(line, b"".join(body))
                    body.clear()
            return message

        async def send_logged(message: Message) -> None:
            nonlocal status
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
                return
            has_more = message.get("more_body", False)
            line = make_line(record.request_id, "chunk" if has_more else "response")
            line.status = 0 if has_more else status
            log.put(line, message.get("body", b""))

        return receive_logged, send_logged

    def _tell(self, record: RequestRecord) -> None:
        now = time.monotonic()
        if self._tracer is not None:
            self._tracer.record(self._trace(record, now))
        if self._is_verbose:
            token = log_request_id.set(record.request_id)
            logger.info("%s", describe(record, now))
            log_request_id.reset(token)
        if self._log is not None and not record.is_complete:
            line = make_line(record.request_id, "response")
            line.status, line.is_complete = record.status, False
            self._log.put(line)

    def _trace(self, record: RequestRecord, now: float) -> RequestTrace:
        observer, operation = record.observer, OPERATIONS.get(record.path)
        attributes: dict = {
            "http.request.method": record.method,
            "http.response.status_code": record.status or 499,
            "atom.request_id": record.request_id,
        }
        if operation is not None:
            attributes |= {
                "http.route": record.path,
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self._model,
            }
        trace = RequestTrace(
            f"{operation} {self._model}" if operation else record.method,
            record.arrival,
            now,
            record.carrier,
            attributes=attributes,
        )
        if observer is not None:
            attributes["gen_ai.response.model"] = self._model
            attributes |= observer.attributes()
            trace.phases = observer.phases(now)
        elif operation is not None:
            trace.phases = [("preprocess", record.arrival, now)]
        if record.status >= 500:
            attributes["error.type"] = str(record.status)
            trace.error = f"HTTP {record.status}"
        elif observer is not None and observer.num_aborted:
            attributes["error.type"] = "aborted"
            trace.error = f"{observer.num_aborted} answers did not end"
        return trace


def _timed(record: RequestRecord, receive: Receive) -> Receive:
    has_body = False

    async def receive_timed() -> Message:
        nonlocal has_body
        if has_body:
            return await receive()
        with stage(BODY_STAGE):
            message = await receive()
        has_body = not message.get("more_body", False)
        return message

    return receive_timed


def _watched(record: RequestRecord, send: Send) -> Send:
    async def send_watched(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.start":
            record.status = message["status"]
            return
        observer = record.observer
        if not record.has_written_token and observer is not None and observer.has_token:
            record.has_written_token = True
            observer.written(time.monotonic())
        if not message.get("more_body", False):
            record.is_complete = True

    return send_watched


def describe(record: RequestRecord, now: float) -> str:
    """One line about a request that has ended, ``key=value`` throughout; no text of it."""
    fields: dict[str, object] = {
        "event": "request_end",
        "route": record.path if record.path in OPERATIONS else "other",
        "status": record.status or 499,
        "complete": str(record.is_complete).lower(),
        "duration_ms": round((now - record.arrival) * 1e3, 1),
    }
    if record.observer is not None:
        fields |= record.observer.facts()
    fields |= {f"{name}_ms": round(seconds * 1e3, 2) for name, seconds in record.stages.items()}
    return " ".join(f"{name}={value}" for name, value in fields.items())
