"""``--request-log``: every request, chunk and response as a line of JSON.

The event loop only hands lines over; a thread of its own writes them. What comes faster than the disk takes
it is dropped and counted, never waited for.
"""

import os
import threading
import time
from collections import deque

import msgspec

from atom.errors import ConfigError
from atom.utils.logging import init_logger

logger = init_logger(__name__)

MAX_QUEUED_BYTES = 64 * 2**20
MAX_QUEUED_LINES = 100_000
CLOSE_TIMEOUT_S = 5.0


class LogLine(msgspec.Struct, omit_defaults=True):
    """One line. ``data`` is JSON where that is what was sent, and text otherwise."""

    time: float  # unix seconds
    request_id: str
    event: str  # request, chunk, response
    method: str = ""
    path: str = ""
    status: int = 0
    is_complete: bool = True  # whether the response reached its end
    data: msgspec.Raw | str = ""


class RequestLog:
    """Appends lines to ``path``, which only its owner may read. ``put`` never blocks and never raises.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str, max_bytes: int = MAX_QUEUED_BYTES, max_lines: int = MAX_QUEUED_LINES):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--request-log {path}: {error.strerror}") from None
        self._file = os.fdopen(fd, "ab", buffering=0)
        self._path = path
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._lines: deque[tuple[LogLine, bytes]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self.num_dropped = 0  # for want of room or disk
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def put(self, line: LogLine, body: bytes = b"") -> None:
        """Hand over ``line`` with ``body`` as its ``data``."""
        with self._lock:
            if (
                self._is_closing
                or len(self._lines) >= self._max_lines
                or self._num_bytes + len(body) > self._max_bytes
            ):
                self.num_dropped += 1
                return
            self._lines.append((line, body))
            self._num_bytes += len(body)
        self._wake.set()

    def close(self) -> None:
        """Write what is queued, for some seconds at most."""
        with self._lock:
            self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        encode = msgspec.json.Encoder().encode
        has_warned = False
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_closing
            while self._lines:
                line, body = self._lines[0]
                try:
                    line.data = _as_json(body)
                    self._file.write(encode(line) + b"\n")
                except Exception as error:  # a full disk, most likely: serving goes on
                    self.num_dropped += 1
                    if not has_warned:
                        logger.error("--request-log %s: a line is lost: %s (said once)", self._path, error)
                    has_warned = True
                with self._lock:
                    self._lines.popleft()
                    self._num_bytes -= len(body)
            if is_last:
                self._file.close()
                return


def _as_json(body: bytes) -> msgspec.Raw | str:
    try:
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(body)))  # in one line, whatever came
    except (msgspec.DecodeError, RecursionError):
        return body.decode("utf-8", "replace")


def make_line(request_id: str, event: str) -> LogLine:
    return LogLine(time.time(), request_id, event)
