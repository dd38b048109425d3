"""Where deltas go: an async stream for the server, a callback, or a list for ``generate``."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from atom.model_engine.outputs import RequestOutput

StreamCallback = Callable[[RequestOutput], None]

_APPENDED = {"text", "output_tokens", "logprobs"}
_KEPT_OF_THE_FIRST = ("prompt_logprobs", "first_times")
_IDENTITY = {"request_id", "index", "num_prompt_tokens"}
_TAKEN_FROM_THE_LAST = tuple(
    field
    for field in RequestOutput.__slots__
    if field not in _APPENDED | _IDENTITY and field not in _KEPT_OF_THE_FIRST
)


def merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two deltas of one answer as one, in ``earlier``: text, ids and log-probabilities are appended (an answer
    gathered delta by delta costs its length, not its square), what only a first delta tells stays, and the
    rest is the later's."""
    earlier.text += later.text
    earlier.output_tokens += later.output_tokens
    if later.logprobs is not None:
        earlier.logprobs = [] if earlier.logprobs is None else earlier.logprobs
        earlier.logprobs += later.logprobs
    for field in _KEPT_OF_THE_FIRST:
        if getattr(earlier, field) is None:
            setattr(earlier, field, getattr(later, field))
    for field in _TAKEN_FROM_THE_LAST:
        setattr(earlier, field, getattr(later, field))
    return earlier


class RequestStream(AsyncIterator[RequestOutput]):
    """Deltas of one request, of all its answers, as they come. Leaving early aborts the request.

    At most one unread delta waits per answer; later ones merge into it, so a slow reader costs no memory
    that grows with the answer's number of deltas. Everything but ``put`` and ``fail`` runs on ``loop``.
    """

    def __init__(self, num_answers: int, on_close: Callable[[], None], loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._unread: dict[int, RequestOutput] = {}
        self._num_open = num_answers
        self._on_close = on_close
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    # -- output thread; LLMEngine batches a whole step into one call per loop

    def put(self, output: RequestOutput) -> None:
        self.loop.call_soon_threadsafe(self.deliver, output)

    def fail(self, error: Exception) -> None:
        self.loop.call_soon_threadsafe(self._fail, error)

    # -- event loop

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def deliver(self, output: RequestOutput) -> None:
        earlier = self._unread.get(output.index)
        self._unread[output.index] = output if earlier is None else merge(earlier, output)
        self._ready.set()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._error is not None:
                self._num_open = 0
                raise self._error
            if self._num_open == 0:
                raise StopAsyncIteration
            self._ready.clear()
            try:
                await self._ready.wait()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        output = self._unread.pop(next(iter(self._unread)))
        if output.finished:
            self._num_open -= 1
        return output

    async def aclose(self) -> None:
        """Stop reading; what is still being generated is aborted."""
        if self._num_open > 0:
            self._num_open = 0
            self._unread.clear()
            self._on_close()


class CallbackSink:
    """Calls ``callback(RequestOutput)`` on the output thread; an error ends up as a finished output."""

    def __init__(self, request_id: str, callback: StreamCallback):
        self._request_id = request_id
        self._callback = callback

    def put(self, output: RequestOutput) -> None:
        self._callback(output)

    def fail(self, error: Exception) -> None:
        self._callback(
            RequestOutput(self._request_id, 0, "", [], finished=True, finish_reason="error", error=str(error))
        )


@dataclass(slots=True)
class Answer:
    """A whole answer: its merged deltas and when they came (``time.monotonic()`` seconds)."""

    output: RequestOutput
    first_token_time: float
    last_token_time: float


class Latch:
    """Lets one thread wait until ``count`` requests have ended, and wakes it once: woken by the first of them it
    would take the interpreter's lock from the thread that delivers the others.
    """

    def __init__(self, count: int):
        self.num_left = count
        self._gate = threading.Lock()
        if count:
            self._gate.acquire()

    def count_down(self) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            self._gate.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether all have ended, after up to ``timeout_s`` seconds. To be asked until it is so, and not again."""
        return self._gate.acquire(timeout=timeout_s)


class CollectingSink:
    """Gathers the answers of one request.

    Args:
        on_delta: sees each delta (progress bars).
        on_answer: takes each answer when it ends.
        on_end: called once, when every answer has ended or the engine is gone.
    """

    def __init__(
        self,
        num_answers: int,
        on_delta: Callable[[RequestOutput], None] | None = None,
        on_answer: Callable[[Answer], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ):
        self.answers: dict[int, Answer] = {}
        self.error: Exception | None = None
        self._on_end = on_end
        self._num_open = num_answers
        self._on_delta = on_delta
        self._on_answer = on_answer

    def put(self, output: RequestOutput) -> None:
        now = time.monotonic()
        if self._on_delta is not None:
            self._on_delta(output)
        answer = self.answers.get(output.index)
        if answer is None:
            answer = self.answers[output.index] = Answer(output, now, now)
        else:
            answer.output, answer.last_token_time = merge(answer.output, output), now
        if output.finished:
            if self._on_answer is not None:
                self._on_answer(answer)
            self._num_open -= 1
            if self._num_open == 0:
                self._end()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
