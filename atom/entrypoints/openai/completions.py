"""POST /v1/completions."""

import asyncio
import time

from atom.core import TokenLogprobs
from atom.entrypoints.openai.answers import AnswerWriter
from atom.entrypoints.openai.endpoint import GenerationEndpoint, Job
from atom.entrypoints.openai.http import DONE, new_id, sse_frame
from atom.entrypoints.openai.logprobs import CompletionLogprobsWriter, TokenBytes, prompt_logprobs
from atom.entrypoints.openai.protocol import (
    UNSET,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from atom.entrypoints.openai.validation import (
    check_context,
    check_model,
    decode_request,
    requested_completion_logprobs,
    sampling_params,
    split_prompts,
)
from atom.model_engine.outputs import RequestOutput


class CompletionWriter(AnswerWriter):
    """The completions shape: chunks are whole responses with one choice each."""

    def __init__(
        self, num_answers: int, model: str, tokenizer: TokenBytes, num_logprobs: int | None, tells_usage: bool
    ):
        super().__init__(num_answers)
        self.id = new_id("cmpl")
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._tells_usage = tells_usage
        self._logprobs = (
            [CompletionLogprobsWriter(tokenizer, num_logprobs) for _ in range(num_answers)]
            if num_logprobs is not None
            else None
        )
        self._untold: dict[int, list[TokenLogprobs]] = {}  # of tokens whose text is held back

    def events(self, batch: list[RequestOutput]) -> bytes:
        frames = []
        for output in batch:
            if output.logprobs and self._logprobs is not None:
                self._untold.setdefault(output.index, []).extend(output.logprobs)
            if not output.text and not output.finished:
                continue
            choice = CompletionChoice(output.index, output.text, self._shape(output.index))
            if output.finished:
                choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
            frames.append(sse_frame(self._body([choice], None if self._tells_usage else UNSET)))
        return b"".join(frames)

    def last_events(self, usage: Usage) -> bytes:
        return (sse_frame(self._body([], usage)) if self._tells_usage else b"") + DONE

    def response(self, usage: Usage) -> CompletionResponse:
        choices = []
        for answer in self.answers:
            self._untold[answer.index] = answer.logprobs
            choice = CompletionChoice(
                answer.index, answer.text, self._shape(answer.index), answer.finish_reason
            )
            choice.stop_reason = answer.stop_reason
            if answer.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(self._tokenizer, answer.prompt_logprobs)
            choices.append(choice)
        return self._body(choices, usage)

    def _shape(self, index: int) -> CompletionLogprobs | None:
        return None if self._logprobs is None else self._logprobs[index].take(self._untold.pop(index, []))

    def _body(self, choices: list[CompletionChoice], usage) -> CompletionResponse:
        return CompletionResponse(self.id, "text_completion", self._created, self._model, choices, usage)


class CompletionsEndpoint(GenerationEndpoint):
    async def prepare(self, body: bytes) -> Job:
        context = self.context
        request = decode_request(body, CompletionRequest)
        check_model(request.model, context.served_model_name)
        logprobs = requested_completion_logprobs(request)
        vocab_size = context.engine.vocab_size
        params = sampling_params(
            request, max_tokens=request.max_tokens, logprobs=logprobs, vocab_size=vocab_size
        )
        texts_or_ids = split_prompts(request, vocab_size)
        salt = request.cache_salt
        prompts = await asyncio.gather(*(context.engine.preprocess(item, salt) for item in texts_or_ids))
        for prompt in prompts:
            check_context(len(prompt), request, request.max_tokens, context.engine.max_model_len)
        tells_usage = bool(request.stream_options and request.stream_options.include_usage)
        num_answers = len(prompts) * params.n
        model, tokenizer = context.served_model_name, context.engine.tokenizer
        writer = CompletionWriter(num_answers, model, tokenizer, logprobs, tells_usage)
        return Job(prompts, params, writer, writer.id, bool(request.stream), request.priority or 0)
