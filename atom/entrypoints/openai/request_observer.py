"""What the server measures of its requests: one observer a request, and the tallies that they fill."""

import time
from typing import Any

from atom.entrypoints.openai.telemetry import current_record
from atom.model_engine.outputs import FirstTimes, RequestOutput
from atom.runtime.histogram import Histogram
from atom.sampling_params import SamplingParams

_LONG_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_QUEUE_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STAGE_BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)

# Before the generation, as ``telemetry.stage`` names them; a request that skips one counts as 0.
STAGES = ("api_body_read", "api_chat_template", "api_tokenize", "api_preprocess_wait")
# Consecutive parts of a streamed answer's time to first token; with the queue time they sum to it.
SLICES = (
    "ttft_api_preprocess",
    "ttft_api_enqueue",
    "ttft_forward_to_output",
    "ttft_output_to_callback",
    "ttft_callback_to_sse",
)


class RequestTallies:
    """Counts and histograms over all requests. Written on the event loop, read by scrapes."""

    def __init__(self) -> None:
        self.finished: dict[str, int] = {}  # answers by finish reason
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.ttft = {"true": Histogram(_LONG_BOUNDS), "false": Histogram(_LONG_BOUNDS)}
        self.histograms = {
            "inter_token_latency_seconds": Histogram(_ITL_BOUNDS),
            "request_queue_time_seconds": Histogram(_QUEUE_BOUNDS),
            **{f"{name}_seconds": Histogram(_STAGE_BOUNDS) for name in (*STAGES, *SLICES)},
        }
        self.open_streams: set[RequestObserver] = set()

    def longest_silence_s(self, now: float) -> float:
        """Seconds since the most starved open stream was last served."""
        return max((now - stream.served_at for stream in list(self.open_streams)), default=0.0)

    def count(self, reason: str, number: int) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + number


class RequestObserver:
    """Times and counts of one HTTP request; one call a delta, so it stays small.

    Made when the request is ready to run. Times are ``time.monotonic()``.
    """

    __slots__ = (
        "_tallies",
        "_arrival",
        "_is_streamed",
        "_answer_id",
        "_params",
        "_ready",
        "_last",
        "_first_times",
        "_first_token",
        "_num_prompt_tokens",
        "_num_cached_tokens",
        "_num_output_tokens",
        "_finish_reasons",
        "served_at",
        "num_aborted",
    )

    def __init__(
        self,
        tallies: RequestTallies,
        arrival: float,
        is_streamed: bool,
        answer_id: str,
        params: SamplingParams,
    ):
        self._tallies = tallies
        self._answer_id = answer_id
        self._params = params
        self._arrival = arrival
        self._is_streamed = is_streamed
        self._ready = self.served_at = time.monotonic()
        self._last: dict[int, float] = {}  # answer -> when its last tokens came
        self._first_times: FirstTimes | None = None
        self._first_token = 0.0
        self._num_prompt_tokens = self._num_cached_tokens = self._num_output_tokens = 0
        self._finish_reasons: list[str] = []
        self.num_aborted = 0
        record = current_record.get()
        if record is not None:
            record.observer = self
            for name in STAGES:
                tallies.histograms[f"{name}_seconds"].observe(record.stages.get(name, 0.0))
        if is_streamed:
            tallies.open_streams.add(self)

    def delta(self, output: RequestOutput, num_prompt_tokens: int, now: float) -> None:
        """``num_prompt_tokens``: what finishing this answer adds to the count of prompt tokens."""
        tallies = self._tallies
        num_tokens = len(output.output_tokens)
        self.served_at = now
        if output.first_times is not None:
            tallies.histograms["request_queue_time_seconds"].observe(output.first_times.queue_time_s)
            if self._first_times is None:
                self._first_times = output.first_times
        if num_tokens:
            last = self._last.get(output.index)
            if last is not None:
                itl = tallies.histograms["inter_token_latency_seconds"]
                itl.observe((now - last) / num_tokens, num_tokens)
            elif not self._last:
                self._first_token = now
                if not self._is_streamed or current_record.get() is None:
                    tallies.ttft["true" if self._is_streamed else "false"].observe(now - self._arrival)
            self._last[output.index] = now
        if output.finished:
            reason = output.finish_reason or "stop"
            tallies.count(reason, 1)
            tallies.num_prompt_tokens += num_prompt_tokens
            tallies.num_generation_tokens += output.num_output_tokens
            self._finish_reasons.append(reason)
            self._num_prompt_tokens += num_prompt_tokens
            self._num_cached_tokens += output.num_cached_tokens if num_prompt_tokens else 0
            self._num_output_tokens += output.num_output_tokens

    @property
    def has_token(self) -> bool:
        return self._first_token > 0

    def written(self, now: float) -> None:
        """The first event after a token was written. Slices of requests with several answers mean nothing."""
        if not self._is_streamed:
            return
        self._tallies.ttft["true"].observe(now - self._arrival)
        times = self._first_times
        if times is None or len(self._last) > 1:
            return
        stations = (self._arrival, self._ready, times.submitted)
        stations += (times.scheduled, times.received, self._first_token, now)
        parts = [max(0.0, after - before) for before, after in zip(stations, stations[1:], strict=False)]
        del parts[2]  # the queue time, which every request has
        for name, seconds in zip(SLICES, parts, strict=True):
            self._tallies.histograms[f"{name}_seconds"].observe(seconds)

    def close(self, num_aborted: int) -> None:
        """The request ended; ``num_aborted`` answers of it did not finish."""
        self._tallies.open_streams.discard(self)
        self.num_aborted = num_aborted
        if num_aborted:
            self._tallies.count("abort", num_aborted)

    # -- what is told of the request when it has ended

    def phases(self, end: float) -> list[tuple[str, float, float]]:
        """(name, start, end) of each phase that the request came to."""
        phases = [("preprocess", self._arrival, self._ready)]
        times = self._first_times
        if times is None:
            return [*phases, ("queue", self._ready, end)]
        first_token = self._first_token or end
        phases += [("queue", self._ready, times.scheduled), ("prefill", times.scheduled, first_token)]
        if self._first_token:
            phases.append(("decode", first_token, max(self._last.values())))
        return phases

    def attributes(self) -> dict[str, Any]:
        """By the names of OpenTelemetry's conventions for generative AI."""
        params = self._params
        attributes: dict[str, Any] = {
            "gen_ai.request.stream": self._is_streamed,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.id": self._answer_id,
            "gen_ai.usage.input_tokens": self._num_prompt_tokens,
            "gen_ai.usage.output_tokens": self._num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": self._num_cached_tokens,
            "gen_ai.response.finish_reasons": self._finish_reasons + ["abort"] * self.num_aborted,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if self._first_token:
            attributes["gen_ai.response.time_to_first_chunk"] = self._first_token - self._arrival
        return attributes

    def facts(self) -> dict[str, object]:
        """The same for a log line."""
        return {
            "stream": str(self._is_streamed).lower(),
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": self._num_cached_tokens,
            "output_tokens": self._num_output_tokens,
            "finish": ",".join(self._finish_reasons + ["abort"] * self.num_aborted) or "none",
            "ttft_ms": round((self._first_token - self._arrival) * 1e3, 1) if self._first_token else "none",
        }
