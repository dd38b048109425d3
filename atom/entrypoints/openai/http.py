"""The HTTP side of a request: reading its body, writing its answer, telling errors."""

import asyncio
import logging
import uuid
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom.entrypoints.openai.errors import ClientDisconnectedError, ErrorBody, describe_error, log_error
from atom.entrypoints.openai.limits import MAX_BODY_BYTES
from atom.entrypoints.openai.validation import valid_request_id
from atom.errors import RequestError

logger = logging.getLogger("atom.server")

BODY_TIMEOUT_S = 60.0
LAST_WRITE_TIMEOUT_S = 1.0

encode_json = msgspec.json.Encoder().encode
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks a proxy in between not to collect the deltas
]
DONE = b"data: [DONE]\n\n"


def sse_frame(value: Any) -> bytes:
    """One server-sent event that carries ``value`` as JSON."""
    return b"data: " + encode_json(value) + b"\n\n"


def event_frame(event: Any) -> bytes:
    """A server-sent event that is named by the tag of its struct."""
    name: str = type(event).__struct_config__.tag
    return b"event: " + name.encode() + b"\ndata: " + encode_json(event) + b"\n\n"


def header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


class RequestIdMiddleware:
    """Gives every request an id, the client's ``X-Request-Id`` where it is valid, and sends it back.

    The id labels log lines and answers; nothing is ever looked up or addressed by it.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if given is not None and valid_request_id(given) else new_id("req")
        scope["request_id"] = request_id
        id_header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def read_json_body(scope: Scope, receive: Receive, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body of a JSON request.

    Raises:
        RequestError: another content type (415), too large (413) or too slow (408).
        ClientDisconnectedError: the client left before the end.
    """
    refusal = _refused_type(scope)
    declared = header(scope, b"content-length") or "0"
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes, declared)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes, f"at least {size}")
                if refusal is None:
                    chunks.append(chunk)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise RequestError(
            f"body must arrive within {BODY_TIMEOUT_S:.0f} s, got {size} bytes",
            status=408,
            code="request_timeout",
        ) from None
    if refusal is not None:
        raise refusal  # only now: closing a connection with unread bytes may cost the client the answer
    return b"".join(chunks)


def _refused_type(scope: Scope) -> RequestError | None:
    """Why the content type of a body is none that we read.

    A browser may send other types across origins without asking; a server on loopback must not obey them.
    """
    content_type = (header(scope, b"content-type") or "").split(";")[0].strip().lower()
    if content_type == "application/json" or content_type.endswith("+json"):
        return None
    return RequestError(
        f"content-type must be application/json, got {content_type or 'none'!r}",
        param="content-type",
        status=415,
        code="unsupported_media_type",
    )


def _encode_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(key.lower().encode(), value.encode()) for key, value in headers.items()]


def _too_large(limit: int, size: str) -> RequestError:
    return RequestError(
        f"body must be at most {limit} bytes, got {size}", param="body", status=413, code="body_too_large"
    )


class Reply:
    """Writes the one answer of a request: JSON, or a stream of events, or an error in the form that still fits."""

    def __init__(self, scope: Scope, send: Send):
        self._send = send
        self.request_id: str = scope.get("request_id", "-")
        self.headers: dict[str, str] = {}  # sent with whatever comes
        self._is_head = scope["method"] == "HEAD"
        self._streaming = False
        self._done = False

    async def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        await self.raw(encode_json(value), "application/json", status, headers)

    async def raw(
        self, body: bytes, content_type: str, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        pairs = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        pairs += _encode_headers(self.headers | (headers or {}))
        self._done = True
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
        await self._send({"type": "http.response.body", "body": b"" if self._is_head else body})

    async def write(self, events: bytes) -> None:
        """Send encoded events; the first call sends the status line as well."""
        await self._start_stream()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        """Send the last events and close the stream."""
        await self._start_stream()
        self._done = True
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _start_stream(self) -> None:
        if not self._streaming:
            self._streaming = True
            pairs = [*_STREAM_HEADERS, *_encode_headers(self.headers)]
            await self._send({"type": "http.response.start", "status": 200, "headers": pairs})

    def error_body(self, status: int, body: ErrorBody) -> Any:
        """An error in the API's own shape."""
        return body

    def error_frame(self, status: int, body: ErrorBody) -> bytes:
        """The same as an event of a stream."""
        return sse_frame(body)

    async def fail(self, error: Exception) -> None:
        """Tell the client: as a status while none was sent, as an event inside a stream. Logs one line."""
        status, body, headers = describe_error(error)
        log_error(self.request_id, status, error)
        if self._done:
            return
        try:
            async with asyncio.timeout(LAST_WRITE_TIMEOUT_S):  # a client that does not read gets no more time
                if self._streaming:
                    await self.end(self.error_frame(status, body))
                else:
                    if status in (408, 413):
                        headers["connection"] = "close"  # the rest of the body is not going to be read
                    await self.json(self.error_body(status, body), status, headers)
        except TimeoutError:
            logger.debug("%s: the client did not read the error", self.request_id)
