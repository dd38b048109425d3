"""From prompts to deltas: runs the engine streams of one HTTP request and measures them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atom.entrypoints.openai.errors import GenerationError, ServerUnavailableError
from atom.entrypoints.openai.protocol import PromptTokensDetails, Usage
from atom.errors import RequestError
from atom.model_engine.outputs import RequestOutput
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.entrypoints.openai.answers import AnswerWriter
    from atom.entrypoints.openai.context import ServerContext
    from atom.model_engine.answer_stops import StopGate
    from atom.model_engine.io_processor import Prompt
    from atom.model_engine.messages import CompiledGuide
    from atom.model_engine.streams import RequestStream

MAX_UNREAD_PER_ANSWER = 4  # deltas held for a slow reader; beyond it the engine's streams merge them


@dataclass(slots=True)
class Job:
    """A request that passed every check and is ready to run.

    ``is_scoring``: only the prompt's log-probabilities are of interest. The engine makes one token to get
    them, and it is dropped.
    """

    prompts: list["Prompt"]
    params: SamplingParams
    writer: "AnswerWriter"
    request_id: str
    is_streamed: bool
    priority: int = 0
    guide: "CompiledGuide | None" = None
    stop_gate: "StopGate | None" = None
    is_scoring: bool = False
    ignored: list[str] = field(default_factory=list)  # fields of the request that have no effect


class Generation:
    """All answers of one HTTP request: one engine stream a prompt, ``n`` answers each.

    Answer ``i * n + j`` is the j-th of prompt i; that is the ``index`` of the outputs. Leaving ``outputs``
    early, by an error or a cancellation, aborts what still runs.
    """

    def __init__(self, context: "ServerContext", job: Job, arrival: float):
        self._engine = context.engine
        self._job = job
        self._observer = context.metrics.observe_request(arrival, job.is_streamed, job.request_id, job.params)
        num_prompts, n = len(job.prompts), job.params.n
        self._num_open = [n] * num_prompts  # unfinished answers of each prompt
        self._num_output_tokens = [0] * (num_prompts * n)
        self._num_cached_tokens = [0] * num_prompts

    @property
    def is_finished(self) -> bool:
        return not any(self._num_open)

    @property
    def usage(self) -> Usage:
        prompt = sum(map(len, self._job.prompts))
        output = sum(self._num_output_tokens)
        return Usage(prompt, output, prompt + output, PromptTokensDetails(sum(self._num_cached_tokens)))

    async def outputs(self) -> AsyncGenerator[list[RequestOutput]]:
        """Deltas as they come, those that are ready together in one list.

        Raises:
            RequestError: the engine refuses the request (also QueueFullError), or cannot ever schedule it.
            GenerationError, EngineDeadError: the engine failed while it ran.
        """
        streams: list[RequestStream] = []
        try:
            job = self._job
            for i, prompt in enumerate(job.prompts):
                stream = self._engine.stream(
                    prompt,
                    job.params,
                    request_id=f"{job.request_id}-{i}",
                    priority=job.priority,
                    stop_gate=job.stop_gate,
                    guide=job.guide,
                )
                streams.append(stream)
            if len(self._num_output_tokens) == 1:
                async for output in streams[0]:
                    yield [self._account(output, 0)]
            else:
                async with aclosing(self._merge(streams)) as batches:
                    async for batch in batches:
                        yield batch
        finally:
            for stream in streams:
                await stream.aclose()  # aborts what has not finished
            self._observer.close(num_aborted=sum(self._num_open[: len(streams)]))

    async def _merge(self, streams: list["RequestStream"]) -> AsyncGenerator[list[RequestOutput]]:
        ready: list[RequestOutput] = []
        arrived, drained = asyncio.Event(), asyncio.Event()

        async def pump(prompt_index: int, stream: "RequestStream") -> None:
            async for output in stream:
                ready.append(self._account(output, prompt_index))
                arrived.set()
                if len(ready) >= MAX_UNREAD_PER_ANSWER * len(self._num_output_tokens):
                    drained.clear()
                    await drained.wait()

        tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
        for task in tasks:
            task.add_done_callback(lambda _: arrived.set())
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                error = next((task.exception() for task in tasks if task.done() and task.exception()), None)
                if error is not None:
                    raise error
                if ready:
                    batch = ready.copy()
                    ready.clear()
                    drained.set()
                    yield batch
                elif all(task.done() for task in tasks):
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _account(self, output: RequestOutput, prompt_index: int) -> RequestOutput:
        """Count a delta and give it its index among all answers. Raises for an answer that failed."""
        if output.finish_reason == "error":
            message = output.error or "the engine gave no reason"
            if message.startswith("unschedulable"):
                raise RequestError(message, code="unschedulable")
            raise GenerationError(f"Generation failed: {message}")
        if output.finish_reason == "abort":
            raise ServerUnavailableError("The server ended this request")
        is_first_answer = output.index == 0
        if is_first_answer:
            self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        output.index += prompt_index * self._job.params.n
        if self._job.is_scoring:
            _drop_answer(output)
        self._num_output_tokens[output.index] = output.num_output_tokens
        num_prompt_tokens = len(self._job.prompts[prompt_index]) if is_first_answer else 0
        self._observer.delta(output, num_prompt_tokens, time.monotonic())
        if output.finished:
            self._num_open[prompt_index] -= 1
        return output


def _drop_answer(output: RequestOutput) -> None:
    output.text, output.output_tokens, output.logprobs = "", [], None
    output.num_output_tokens = 0
    if output.finished:
        output.finish_reason, output.stop_reason = "length", None
