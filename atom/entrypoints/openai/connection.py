"""The HTTP connection with bounds: size and number of headers, and the time they may take.

uvicorn's parser takes headers of any size and number, and waits for them for ever; every other bound
(bodies, fields) is checked later, by code that this protects.
"""

import asyncio
from asyncio import TimerHandle

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from atom.entrypoints.openai.errors import ErrorBody, ErrorObject

MAX_HEAD_BYTES = 64 * 2**10  # request line and headers together
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 20.0  # from the connection, or the first byte of a later request, to the last header


class _HeadTooLarge(Exception):
    pass


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's connection; refuses a head that passes a bound with 431 or 408 and closes."""

    _head_bytes = 0  # of the head that is being read; -1: none is
    _head_timer: TimerHandle | None = None
    _refusal = (400, "The request is not valid HTTP", "invalid_http")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A header that never ends shows in no callback: its bytes are counted as they come.
        if self._head_bytes >= 0 and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > 2 * MAX_HEAD_BYTES:  # what the callbacks count is in here as well
                self._refuse_head()
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._head_bytes = -1
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
            raise _HeadTooLarge  # the parser stops, and send_400_response follows

    def _refuse_head(self) -> None:
        message = f"The request's head must have at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
        self._refusal = (431, message, "headers_too_large")

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        self._head_timer = None
        message = f"The request's head must arrive within {HEAD_TIMEOUT_S:g} s"
        self._refusal = (408, message, "request_timeout")
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Tell what is wrong as every other error is told, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would land inside another answer
            status, message, code = self._refusal
            error = ErrorObject(message, "invalid_request_error", None, code)
            body = msgspec.json.encode(ErrorBody(error))
            lines = (
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
            )
            self.transport.write(STATUS_LINE[status] + b"\r\n".join((*lines, b"", body)))
        self.transport.close()
