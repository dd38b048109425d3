"""POST /v1/chat/completions."""

import time

from atom.core import TokenLogprobs
from atom.entrypoints.openai.answers import AnswerWriter
from atom.entrypoints.openai.chat_core import AnswerReader, PreparedChat, prepare_chat
from atom.entrypoints.openai.endpoint import GenerationEndpoint
from atom.entrypoints.openai.generation import Generation, Job
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
    FunctionCall,
    FunctionCallDelta,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
    UnsetType,
    Usage,
)
from atom.entrypoints.openai.tool_parsers.base import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from atom.entrypoints.openai.validation import check_model, decode_request
from atom.model_engine.outputs import RequestOutput


class ChatWriter(AnswerWriter):
    """The chat shape: a chunk with the role, chunks with text, reasoning and tool calls, one with the finish
    reason, for each answer."""

    def __init__(self, chat: PreparedChat, model: str, tokenizer: TokenBytes):
        super().__init__(chat.params.n)
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._num_logprobs = chat.num_logprobs
        self._num_prompt_logprobs = chat.request.prompt_logprobs
        options = chat.request.stream_options
        self._tells_usage = bool(options and options.include_usage)
        self._tells_usage_always = bool(self._tells_usage and options and options.continuous_usage_stats)
        self._readers = chat.readers()
        self._has_role = [False] * chat.params.n
        self._prompt_rows: PromptLogprobs | UnsetType = UNSET  # to be told with the next chunk
        self._untold: dict[int, list[TokenLogprobs]] = {}  # of tokens whose text is held back

    def events(self, batch: list[RequestOutput], generation: Generation) -> bytes:
        frames: list[bytes] = []
        usage = generation.usage if self._tells_usage_always else (None if self._tells_usage else UNSET)

        def add(choice: ChatChunkChoice) -> None:
            chunk = self._chunk([choice], usage)
            chunk.prompt_logprobs, self._prompt_rows = self._prompt_rows, UNSET
            frames.append(sse_frame(chunk))

        for output in batch:
            index, reader = output.index, self._readers[output.index]
            if not self._has_role[index]:
                if not any(self._has_role):
                    self._prompt_rows = self._prompt_logprobs(output.prompt_logprobs)
                self._has_role[index] = True
                add(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
            if output.logprobs and self._num_logprobs is not None:
                self._untold.setdefault(index, []).extend(output.logprobs)
            for event in reader.read(output):
                delta = _delta(event)
                if delta is not None:
                    add(ChatChunkChoice(index, delta, self._shape(index)))
            if output.finished:
                reason = reader.finish_reason(output.finish_reason)
                choice = ChatChunkChoice(index, ChatDelta(), self._shape(index), reason)
                choice.stop_reason = output.stop_reason
                add(choice)
        return b"".join(frames)

    def last_events(self, usage: Usage) -> bytes:
        return (sse_frame(self._chunk([], usage)) if self._tells_usage else b"") + DONE

    def response(self, usage: Usage) -> ChatCompletionResponse:
        choices = []
        for answer, reader in zip(self.answers, self._readers, strict=True):
            self._untold[answer.index] = answer.logprobs
            message = _message(reader, answer.text)
            logprobs = self._shape(answer.index) or (None if self._num_logprobs is None else ChatLogprobs([]))
            reason = reader.finish_reason(answer.finish_reason)
            choices.append(ChatChoice(answer.index, message, logprobs, reason, answer.stop_reason))
        response = ChatCompletionResponse(
            self.id, "chat.completion", self._created, self._model, choices, usage
        )
        response.prompt_logprobs = self._prompt_logprobs(self.answers[0].prompt_logprobs)
        return response

    def _prompt_logprobs(self, entries: list[TokenLogprobs | None] | None) -> PromptLogprobs | UnsetType:
        if entries is None or self._num_prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(self._tokenizer, entries, self._num_prompt_logprobs)

    def _shape(self, index: int) -> ChatLogprobs | None:
        entries = self._untold.pop(index, None)
        if not entries or self._num_logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, self._num_logprobs, entries)

    def _chunk(self, choices: list[ChatChunkChoice], usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            self.id, "chat.completion.chunk", self._created, self._model, choices, usage
        )


def _delta(event: ParserEvent) -> ChatDelta | None:
    match event:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case ToolCallStart(index, call_id, name):
            function = FunctionCallDelta("", name)
            return ChatDelta(tool_calls=[ToolCallDelta(index, function, call_id, "function")])
        case ToolCallArguments(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionCallDelta(text))])
    return None


def _message(reader: AnswerReader, text: str) -> AssistantMessage:
    events = reader.read_text(text, is_finished=True)
    content, calls = collect(events)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    message = AssistantMessage("assistant", content if content or not calls else None)
    if reasoning:
        message.reasoning_content = reasoning
    if calls:
        message.tool_calls = [ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in calls]
    return message


class ChatEndpoint(GenerationEndpoint):
    async def prepare(self, body: bytes) -> Job:
        context = self.context
        request, ignored = decode_request(body, ChatCompletionRequest, context.strict_fields)
        check_model(request.model, context.served_model_name)
        chat = await prepare_chat(context, request)
        writer = ChatWriter(chat, context.served_model_name, context.engine.tokenizer)
        return chat.job(writer, writer.id, ignored)
