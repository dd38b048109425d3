"""The client of the serving benchmark: streamed requests over plain asyncio, timed where the bytes arrive.

One connection a request. The time of an event is taken when its bytes are read from the socket, before
anything is parsed, so that a busy client shows up as little as possible in what it measures.
"""

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from atom.errors import ConfigError

REQUEST_TIMEOUT_S = 6 * 3600.0
CONTROL_TIMEOUT_S = 600.0  # starting and stopping a profile, reading counters
_MAX_ERROR_CHARS = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """The part of a streamed event, of either API, that is measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds; ``start`` and ``token_times`` on the clock of ``time.perf_counter``.

    Attributes:
        num_output_tokens: as the server counts them; 0 when it does not say.
        token_times: when each event that carries text came; the end's where none did.
        latency: from sending the request to its last event with text.
        error: why it failed; empty for success.
    """

    num_prompt_tokens: int
    start: float = 0.0
    token_times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_output_tokens: int = 0
    error: str = ""

    @property
    def is_success(self) -> bool:
        return not self.error

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.start if self.token_times else 0.0

    @property
    def latency(self) -> float:
        return self.token_times[-1] - self.start if self.token_times else 0.0

    @property
    def itls(self) -> list[float]:
        times = self.token_times
        return [b - a for a, b in zip(times, times[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 for an answer of one token."""
        return (
            (self.latency - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else 0.0
        )


class Client:
    """Talks to one server. Use it inside a running event loop, after ``await client.open()``.

    Args:
        base_url: ``http://host:port``, a path prefix allowed; ``https`` is verified against the system's
            authorities.
        api_key: sent as a bearer token.
    """

    def __init__(self, base_url: str, api_key: str | None = None):
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"--base-url must be http://host[:port] or https://, got {base_url!r}")
        self._host = url.hostname
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._prefix = url.path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        host = f"[{self._host}]" if ":" in self._host else self._host
        headers = [f"Host: {host}:{self._port}", "Connection: close", "Accept: */*"]
        if api_key:
            headers.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(headers)
        self._address = self._host

    async def open(self) -> None:
        """Look the host up once, so that a burst of requests does not wait for a resolver."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(f"--base-url names the unknown host {self._host!r} ({error})") from None
        for *_, address in found:
            self._address = address[0]
            try:
                transport, _ = await loop.create_connection(asyncio.Protocol, self._address, self._port)
            except OSError:
                continue
            transport.close()
            return

    async def stream(self, path: str, body: bytes, outcome: Outcome) -> None:
        """Send one generation request and read its events into ``outcome``; never raises for a failed one."""
        reader = _EventReader(outcome)
        try:
            outcome.start = time.perf_counter()
            status, answer = await self._exchange("POST", path, body, reader, REQUEST_TIMEOUT_S)
        except (OSError, httptools.HttpParserError, msgspec.DecodeError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return
        if status != 200:
            outcome.error = f"HTTP {status}: {_first_words(answer)}"
        elif not outcome.error and not reader.is_complete:
            outcome.error = "the stream ended early"
        elif not outcome.error and not outcome.token_times:
            outcome.error = "the stream held no answer"

    async def fetch(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body. Raises OSError when the server cannot be reached or breaks off."""
        return await self._exchange(method, path, b"", None, CONTROL_TIMEOUT_S)

    async def _exchange(
        self, method: str, path: str, body: bytes, events: "_EventReader | None", timeout_s: float
    ) -> tuple[int, bytes]:
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        transport, answer = await loop.create_connection(
            lambda: _Answer(events),
            self._address,
            self._port,
            ssl=self._tls,
            server_hostname=self._host if self._tls else None,
        )
        try:
            transport.write(head.encode() + body)
            async with asyncio.timeout(timeout_s):
                return await answer.done
        finally:
            transport.close()


class _Answer(asyncio.Protocol):
    """One HTTP response: ``done`` becomes ``(status, body)``; the body of a stream goes to ``events``."""

    def __init__(self, events: "_EventReader | None"):
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._events = events
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._now = 0.0
        self._status = 0
        self._has_length = False

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            if not self.done.done():
                self.done.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if self._status and not self._has_length and error is None:
            self.on_message_complete()  # a body without a length ends with the connection
        else:
            self.done.set_exception(error or ConnectionError("the server closed the connection"))

    # -- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length = self._has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, chunk: bytes) -> None:
        if self._events is not None and self._status == 200:
            # The library hides the cause of what a callback raises, so errors are kept and told afterwards.
            try:
                self._events.feed(chunk, self._now)
            except msgspec.DecodeError as error:
                if not self.done.done():
                    self.done.set_exception(error)
        else:
            self._body += chunk

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, bytes(self._body)))


class _EventReader:
    """Server-sent events of a completion or chat answer."""

    def __init__(self, outcome: Outcome):
        self._outcome = outcome
        self._rest = b""
        self.is_complete = False  # the end mark was read

    def feed(self, chunk: bytes, now: float) -> None:
        """Raises msgspec.DecodeError for an event that is none."""
        data = self._rest + chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self._take(event[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_complete = True
            return
        event = _decode_event(data)
        outcome = self._outcome
        if event.error is not None:
            outcome.error = f"error in the stream: {_first_words(msgspec.json.encode(event.error))}"
            return
        if event.usage is not None:
            outcome.num_output_tokens = event.usage.completion_tokens
        for choice in event.choices:
            text = choice.text
            if choice.delta is not None:
                text = (choice.delta.reasoning_content or "") + (choice.delta.content or "")
            if text:
                outcome.texts.append(text)
                outcome.token_times.append(now)
            elif choice.finish_reason is not None and not outcome.token_times:
                outcome.token_times.append(now)  # an answer without text: its end is all there is to time


def _first_words(body: bytes) -> str:
    """The message of an error body, shortened."""
    text = body.decode("utf-8", "replace").strip()
    try:
        found = msgspec.json.decode(body)
        found = found.get("error", found)
        text = str(found.get("message", text)) if isinstance(found, dict) else str(found)
    except (msgspec.DecodeError, AttributeError):
        pass
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "..."


@dataclass(frozen=True)
class RequestForm:
    """How the benchmark's requests are written: everything but the prompt and its length."""

    is_chat: bool
    path: str
    model: str
    ignore_eos: bool = False
    best_of: int = 1
    use_beam_search: bool = False
    logprobs: int | None = None

    def body(self, prompt: str, max_tokens: int, model: str | None = None) -> bytes:
        """The JSON of a streamed, greedy request."""
        fields: dict[str, Any] = {"model": model or self.model}
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
            fields["max_completion_tokens"] = max_tokens
        else:
            fields |= {"prompt": prompt, "max_tokens": max_tokens}
        fields |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.best_of > 1:
            fields["best_of"] = self.best_of
        if self.use_beam_search:
            fields["use_beam_search"] = True
        if self.logprobs is not None:
            fields |= (
                {"logprobs": True, "top_logprobs": self.logprobs}
                if self.is_chat
                else {"logprobs": self.logprobs}
            )
        return msgspec.json.encode(fields)
