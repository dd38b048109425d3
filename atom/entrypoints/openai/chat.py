"""POST /v1/chat/completions."""

import asyncio
import time
from typing import Any

from atom.core import TokenLogprobs
from atom.entrypoints.openai.answers import AnswerWriter
from atom.entrypoints.openai.endpoint import GenerationEndpoint, Job
from atom.entrypoints.openai.http import DONE, new_id, sse_frame
from atom.entrypoints.openai.logprobs import TokenBytes, chat_logprobs, prompt_logprobs
from atom.entrypoints.openai.protocol import (
    UNSET,
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from atom.entrypoints.openai.validation import (
    check_context,
    check_messages,
    check_model,
    decode_request,
    requested_chat_logprobs,
    sampling_params,
)
from atom.errors import RequestError
from atom.model_engine.outputs import RequestOutput

NO_TEMPLATE = (
    "This model has no usable chat template, so messages cannot be turned into a prompt. Start the server with "
    "--chat-template FILE, or use /v1/completions"
)


class ChatWriter(AnswerWriter):
    """The chat shape: a chunk with the role, chunks with text, one with the finish reason, for each answer."""

    def __init__(
        self, num_answers: int, model: str, tokenizer: TokenBytes, num_logprobs: int | None, tells_usage: bool
    ):
        super().__init__(num_answers)
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._tells_usage = tells_usage
        self._has_role = [False] * num_answers
        self._untold: dict[int, list[TokenLogprobs]] = {}  # of tokens whose text is held back

    def events(self, batch: list[RequestOutput]) -> bytes:
        frames: list[bytes] = []
        for output in batch:
            index = output.index
            if not self._has_role[index]:
                self._has_role[index] = True
                frames.append(self._frame(ChatChunkChoice(index, ChatDelta(role="assistant", content=""))))
            if output.logprobs and self._num_logprobs is not None:
                self._untold.setdefault(index, []).extend(output.logprobs)
            if output.text:
                choice = ChatChunkChoice(index, ChatDelta(content=output.text), self._shape(index))
                frames.append(self._frame(choice))
            if output.finished:
                choice = ChatChunkChoice(index, ChatDelta(), self._shape(index), output.finish_reason)
                choice.stop_reason = output.stop_reason
                frames.append(self._frame(choice))
        return b"".join(frames)

    def last_events(self, usage: Usage) -> bytes:
        if not self._tells_usage:
            return DONE
        chunk = ChatCompletionChunk(self.id, "chat.completion.chunk", self._created, self._model, [], usage)
        return sse_frame(chunk) + DONE

    def response(self, usage: Usage) -> ChatCompletionResponse:
        choices = []
        for answer in self.answers:
            self._untold[answer.index] = answer.logprobs
            message = AssistantMessage("assistant", answer.text)
            logprobs = self._shape(answer.index) or (None if self._num_logprobs is None else ChatLogprobs([]))
            choices.append(
                ChatChoice(answer.index, message, logprobs, answer.finish_reason, answer.stop_reason)
            )
        told = self.answers[0].prompt_logprobs
        return ChatCompletionResponse(
            self.id,
            "chat.completion",
            self._created,
            self._model,
            choices,
            usage,
            UNSET if told is None else prompt_logprobs(self._tokenizer, told),
        )

    def _shape(self, index: int) -> ChatLogprobs | None:
        entries = self._untold.pop(index, None)
        if not entries or self._num_logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, self._num_logprobs, entries)

    def _frame(self, choice: ChatChunkChoice) -> bytes:
        usage = None if self._tells_usage else UNSET
        return sse_frame(
            ChatCompletionChunk(self.id, "chat.completion.chunk", self._created, self._model, [choice], usage)
        )


def template_messages(messages: list[ChatMessage], knows_developer: bool) -> list[dict[str, Any]]:
    """Messages as templates read them: content is always a string, parts are joined by newlines.

    A template that does not know the role ``developer`` gets it as ``system``, its older name.
    """
    result = []
    for message in messages:
        content = message.content
        if isinstance(content, list):
            content = "\n".join(part.text or "" for part in content)
        role = "system" if message.role == "developer" and not knows_developer else message.role
        item: dict[str, Any] = {"role": role, "content": content or ""}
        if message.name is not None:
            item["name"] = message.name
        if message.reasoning_content is not None:
            item["reasoning_content"] = message.reasoning_content
        result.append(item)
    return result


class ChatEndpoint(GenerationEndpoint):
    async def prepare(self, body: bytes) -> Job:
        context = self.context
        request = decode_request(body, ChatCompletionRequest)
        check_model(request.model, context.served_model_name)
        check_messages(request.messages)
        logprobs = requested_chat_logprobs(request)
        max_tokens = (
            request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        )
        params = sampling_params(
            request, max_tokens=max_tokens, logprobs=logprobs, vocab_size=context.engine.vocab_size
        )
        ids = await self._encode(request)
        check_context(len(ids), request, max_tokens, context.engine.max_model_len)
        prompt = await context.engine.preprocess(ids, request.cache_salt)
        tells_usage = bool(request.stream_options and request.stream_options.include_usage)
        writer = ChatWriter(
            params.n, context.served_model_name, context.engine.tokenizer, logprobs, tells_usage
        )
        return Job([prompt], params, writer, writer.id, bool(request.stream), request.priority or 0)

    async def _encode(self, request: ChatCompletionRequest) -> list[int]:
        template = self.context.chat_template
        if template is None:
            raise RequestError(NO_TEMPLATE, param="messages", code="no_chat_template")
        template.check_kwargs(request.chat_template_kwargs or {})
        messages = template_messages(request.messages, "developer" in template.source)

        def work() -> list[int]:
            text = template.render(
                messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                kwargs=request.chat_template_kwargs,
            )
            # The template writes the special tokens itself, so the tokenizer must not add any.
            return self.context.engine.tokenizer.encode(text, add_special_tokens=False)

        return await asyncio.get_running_loop().run_in_executor(self.context.executor, work)
