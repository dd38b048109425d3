"""What the front end remembers of a request in flight: text state, counts, and where its output goes."""

import time
from typing import Protocol

from atom.core import TokenLogprobs, openai_finish_reason
from atom.model_engine.answer_stops import AnswerStopChecker, StopGate
from atom.model_engine.detokenizer import Detokenizer
from atom.model_engine.messages import Logprobs, RequestEvent
from atom.model_engine.outputs import FirstTimes, RequestOutput
from atom.model_engine.stop_strings import StopChecker
from atom.sampling_params import SamplingParams


class Sink(Protocol):
    """Where a request's deltas go. ``put`` is called from the output thread and must not block."""

    def put(self, output: RequestOutput) -> None: ...

    def fail(self, error: Exception) -> None: ...


class RequestState:
    """One request: n answers that share a prompt and a sink."""

    __slots__ = (
        "request_id",
        "params",
        "num_prompt_tokens",
        "eos_ids",
        "sink",
        "arrival_time",
        "answers",
        "num_open",
    )

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        num_prompt_tokens: int,
        eos_ids: frozenset[int],
        sink: Sink,
        arrival_time: float,
    ):
        self.request_id = request_id
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.eos_ids = eos_ids  # the model's own ends that are in force: they are no stop_reason
        self.sink = sink
        self.arrival_time = arrival_time
        self.answers: list[AnswerState] = []
        self.num_open = params.n


class AnswerState:
    """One answer: turns token deltas into text deltas and finds stop strings."""

    __slots__ = (
        "seq_id",
        "index",
        "request",
        "finished",
        "has_started",
        "num_output_tokens",
        "num_cached_tokens",
        "_detokenizer",
        "_stops",
        "_special_stops",
    )

    def __init__(
        self,
        seq_id: int,
        index: int,
        request: RequestState,
        detokenizer: Detokenizer,
        stops: StopChecker | AnswerStopChecker | None,
        special_stops: dict[int, str],
    ):
        self.seq_id = seq_id
        self.index = index
        self.request = request
        self.finished = False
        self.has_started = False  # it has a first token, or was given up: it waits no longer
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._special_stops = special_stops  # stop strings that are one special token each, by its id

    def advance(self, new_ids: list[int], event: RequestEvent | None) -> RequestOutput:
        """The delta for ``new_ids``. Sets ``finished`` when the engine or a stop string ends the answer."""
        self.num_output_tokens += len(new_ids)
        output = RequestOutput(self.request.request_id, self.index, "", new_ids)
        if event is not None:
            self._take_event(event, output)
        shown_ids = new_ids
        if output.finished and not self.request.params.skip_special_tokens and output.finish_reason == "stop":
            shown_ids = new_ids[:-1]  # what ends the answer is not part of it
        text = self._detokenizer.update(shown_ids, output.finished)
        if self._stops is not None:
            text, matched = self._stops.feed(text)
            if matched is not None:
                output.finished, output.finish_reason, output.stop_reason = True, "stop", matched
                output.error = None
            elif output.finished:
                text += self._stops.flush()
        output.text = text
        output.num_prompt_tokens = self.request.num_prompt_tokens
        output.num_output_tokens = self.num_output_tokens
        output.num_cached_tokens = self.num_cached_tokens
        self.finished = output.finished
        return output

    def _take_event(self, event: RequestEvent, output: RequestOutput) -> None:
        if event.num_cached_tokens >= 0:
            self.num_cached_tokens = event.num_cached_tokens
            arrival = self.request.arrival_time
            output.first_times = FirstTimes(arrival, event.first_scheduled_time, time.monotonic())
        if event.logprobs is not None:
            output.logprobs = [_logprobs(entry) for entry in event.logprobs]
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *(_logprobs(entry) for entry in event.prompt_logprobs)]
        reason = event.leave_reason
        if reason:
            output.finished = True
            output.finish_reason = openai_finish_reason(reason)
            if output.finish_reason == "error":
                output.error = reason
            elif reason[5:].isdigit():  # stop_<id>
                token_id = int(reason[5:])
                if token_id not in self.request.eos_ids:
                    output.stop_reason = self._special_stops.get(token_id, token_id)


def make_stop_checker(
    stops: list[str] | None, gate: StopGate | None
) -> StopChecker | AnswerStopChecker | None:
    """What finds the stop strings of one answer: everywhere, or from where ``gate`` says that it begins."""
    if not stops:
        return None
    return StopChecker(stops) if gate is None else AnswerStopChecker(stops, gate)


def _logprobs(entry: Logprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs)
