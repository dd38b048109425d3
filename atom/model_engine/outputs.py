"""What the front end hands out for a request: one type for streams, callbacks and the server."""

from dataclasses import dataclass

from atom.core import TokenLogprobs


@dataclass(frozen=True, slots=True)
class FirstTimes:
    """When a request passed the stations on the way to its first token (``time.monotonic()``)."""

    submitted: float  # handed to the engine
    scheduled: float  # its first forward pass
    received: float  # the engine's process had told its first token

    @property
    def queue_time_s(self) -> float:
        return max(0.0, self.scheduled - self.submitted)


@dataclass(slots=True)
class RequestOutput:
    """One delta of one answer. ``text`` and ``output_tokens`` are what is new since the last delta.

    ``text`` never holds part of a stop string, and concatenated deltas equal the whole answer's text.
    ``finish_reason`` is OpenAI's: stop, length, abort or error; ``error`` explains the last.
    """

    request_id: str
    index: int  # which of the n answers
    text: str
    output_tokens: list[int]
    finished: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far, this delta included
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None  # one entry an output token
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # first output only; first entry None
    error: str | None = None
    kv_transfer_params_output: dict | None = None
    first_times: FirstTimes | None = None  # first output only
