"""POST /v1/completions."""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atom.core import TokenLogprobs
from atom.entrypoints.openai.answers import Answer, AnswerWriter
from atom.entrypoints.openai.endpoint import GenerationEndpoint
from atom.entrypoints.openai.generation import Generation, Job
from atom.entrypoints.openai.http import DONE, new_id, sse_frame
from atom.entrypoints.openai.logprobs import CompletionLogprobsWriter, Echo, TokenBytes, prompt_logprobs
from atom.entrypoints.openai.protocol import (
    UNSET,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    PromptLogprobs,
    UnsetType,
    Usage,
)
from atom.entrypoints.openai.structured import compile_guide, requested_guide
from atom.entrypoints.openai.telemetry import stage
from atom.entrypoints.openai.validation import (
    check_context,
    check_model,
    decode_request,
    is_scoring,
    requested_choices,
    requested_completion_logprobs,
    sampling_params,
    split_prompts,
)
from atom.model_engine.outputs import RequestOutput
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom.model_engine.io_processor import Prompt


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """What a completions request wants its answer to hold beside the text."""

    num_prompts: int
    num_choices: int  # of a prompt
    num_candidates: int  # generated for a prompt; the likeliest ``num_choices`` are told
    num_logprobs: int | None
    echoes: list[Echo] | None = None  # each prompt, to be told before its answers
    num_prompt_logprobs: int | None = None
    shows_special: bool = False
    tells_usage: bool = False
    tells_usage_always: bool = False


class CompletionWriter(AnswerWriter):
    """The completions shape: chunks are whole responses with one choice each."""

    def __init__(self, form: CompletionForm, model: str, tokenizer: TokenBytes):
        num_answers = form.num_prompts * form.num_candidates
        super().__init__(num_answers)
        self.id = new_id("cmpl")
        self._form = form
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = (
            [self._logprobs_writer(index) for index in range(num_answers)]
            if form.num_logprobs is not None
            else None
        )
        self._is_open = [False] * num_answers  # something of it was told
        self._untold: dict[int, list[TokenLogprobs | None]] = {}  # of tokens whose text is held back

    def _logprobs_writer(self, index: int) -> CompletionLogprobsWriter:
        form = self._form
        echo = None if form.echoes is None else form.echoes[index // form.num_candidates]
        return CompletionLogprobsWriter(
            self._tokenizer, form.num_logprobs or 0, echo=echo, shows_special=form.shows_special
        )

    def events(self, batch: list[RequestOutput], generation: Generation) -> bytes:
        frames = []
        for output in batch:
            index, text = output.index, output.text
            if self._form.echoes is not None and not self._is_open[index]:
                text = self._form.echoes[index // self._form.num_candidates].text + text
                self._untell(index, output.prompt_logprobs)
            self._untell(index, output.logprobs)
            told = self._prompt_logprobs(output.prompt_logprobs)
            if not text and not output.finished and told is UNSET:
                continue
            self._is_open[index] = True
            choice = CompletionChoice(index, text, self._shape(index), prompt_logprobs=told)
            if output.finished:
                choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
            frames.append(sse_frame(self._body([choice], self._running_usage(generation))))
        return b"".join(frames)

    def last_events(self, usage: Usage) -> bytes:
        return (sse_frame(self._body([], usage)) if self._form.tells_usage else b"") + DONE

    def response(self, usage: Usage) -> CompletionResponse:
        form = self._form
        choices = []
        for prompt in range(form.num_prompts):
            candidates = self.answers[prompt * form.num_candidates : (prompt + 1) * form.num_candidates]
            told = candidates[0].prompt_logprobs
            for answer in _likeliest(candidates, form.num_choices):
                choice = self._choice(len(choices), answer, prompt, told)
                choice.prompt_logprobs = self._prompt_logprobs(told)
                choices.append(choice)
        return self._body(choices, usage)

    def _choice(
        self, index: int, answer: Answer, prompt: int, prompt_entries: list[TokenLogprobs | None] | None
    ) -> CompletionChoice:
        text = answer.text
        if self._form.echoes is not None:
            text = self._form.echoes[prompt].text + text
            self._untell(answer.index, prompt_entries)
        self._untell(answer.index, answer.logprobs)
        choice = CompletionChoice(index, text, self._shape(answer.index), answer.finish_reason)
        choice.stop_reason = answer.stop_reason
        return choice

    def _untell(self, index: int, entries: list | None) -> None:
        if entries and self._logprobs is not None:
            self._untold.setdefault(index, []).extend(entries)

    def _prompt_logprobs(self, entries: list[TokenLogprobs | None] | None) -> PromptLogprobs | UnsetType:
        num_top = self._form.num_prompt_logprobs
        if entries is None or num_top is None:
            return UNSET
        return prompt_logprobs(self._tokenizer, entries, num_top)

    def _shape(self, index: int) -> CompletionLogprobs | None:
        return None if self._logprobs is None else self._logprobs[index].take(self._untold.pop(index, []))

    def _running_usage(self, generation: Generation):
        if self._form.tells_usage_always:
            return generation.usage
        return None if self._form.tells_usage else UNSET

    def _body(self, choices: list[CompletionChoice], usage) -> CompletionResponse:
        return CompletionResponse(self.id, "text_completion", self._created, self._model, choices, usage)


def _likeliest(candidates: list[Answer], count: int) -> list[Answer]:
    """The ``count`` candidates with the best mean log-probability a token, best first."""
    if count == len(candidates):
        return candidates

    def mean(answer: Answer) -> float:
        values = [entry.logprob for entry in answer.logprobs]
        return sum(values) / len(values) if values else float("-inf")

    return sorted(candidates, key=mean, reverse=True)[:count]


class CompletionsEndpoint(GenerationEndpoint):
    async def prepare(self, body: bytes) -> Job:
        context = self.context
        engine = context.engine
        request, ignored = decode_request(body, CompletionRequest, context.strict_fields)
        check_model(request.model, context.served_model_name)
        num_choices, num_candidates = requested_choices(request)
        params = self._sampling_params(request, num_candidates)
        guide = await compile_guide(engine, params.guide)
        texts_or_ids = split_prompts(request, engine.vocab_size)
        salt = request.cache_salt
        with stage("api_tokenize"):
            prompts = await asyncio.gather(*(engine.preprocess(item, salt) for item in texts_or_ids))
        for prompt in prompts:
            check_context(
                len(prompt), params.max_tokens, engine.max_model_len, min_tokens=request.min_tokens or 0
            )
        options = request.stream_options
        form = CompletionForm(
            num_prompts=len(prompts),
            num_choices=num_choices,
            num_candidates=num_candidates,
            num_logprobs=request.logprobs,
            echoes=self._echoes(request, texts_or_ids, prompts) if request.echo else None,
            num_prompt_logprobs=request.prompt_logprobs,
            shows_special=request.skip_special_tokens is False,
            tells_usage=bool(options and options.include_usage),
            tells_usage_always=bool(options and options.include_usage and options.continuous_usage_stats),
        )
        writer = CompletionWriter(form, context.served_model_name, engine.tokenizer)
        return Job(
            prompts,
            params,
            writer,
            writer.id,
            bool(request.stream),
            priority=request.priority or 0,
            guide=guide,
            is_scoring=is_scoring(request),
            ignored=ignored,
        )

    def _sampling_params(self, request: CompletionRequest, num_candidates: int) -> SamplingParams:
        num_logprobs = requested_completion_logprobs(request)
        num_prompt_logprobs = request.prompt_logprobs
        if request.echo and num_logprobs is not None:  # an echoed prompt is told like the answer
            num_prompt_logprobs = max(num_logprobs, num_prompt_logprobs or 0)
        if num_candidates > (request.n or 1) and num_logprobs is None:
            num_logprobs = 0  # to find the likeliest
        return sampling_params(
            request,
            max_tokens=1 if is_scoring(request) else request.max_tokens,
            logprobs=num_logprobs,
            vocab_size=self.context.engine.vocab_size,
            n=num_candidates,
            prompt_logprobs=num_prompt_logprobs,
            guide=requested_guide(request),
        )

    def _echoes(
        self, request: CompletionRequest, given: list[str | list[int]], prompts: list["Prompt"]
    ) -> list[Echo]:
        decode = self.context.engine.tokenizer.decode
        skip = request.skip_special_tokens is not False
        return [
            Echo(
                item if isinstance(item, str) else decode(item, skip_special_tokens=skip), prompt.token_ids[0]
            )
            for item, prompt in zip(given, prompts, strict=True)
        ]
