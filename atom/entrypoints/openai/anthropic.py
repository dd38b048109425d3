"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

import base64
import os
import uuid
from collections.abc import Iterator

from starlette.types import Scope, Send

from atom.entrypoints.openai import anthropic_protocol as p
from atom.entrypoints.openai.answers import AnswerWriter
from atom.entrypoints.openai.anthropic_chat import make_chat_request, shows_thinking
from atom.entrypoints.openai.chat_core import PreparedChat, decoded_arguments, prepare_chat, render
from atom.entrypoints.openai.endpoint import GenerationEndpoint
from atom.entrypoints.openai.errors import ErrorBody
from atom.entrypoints.openai.generation import Generation, Job
from atom.entrypoints.openai.http import Reply, event_frame
from atom.entrypoints.openai.protocol import Usage
from atom.entrypoints.openai.tokenization import JsonEndpoint
from atom.entrypoints.openai.tool_parsers.base import (
    Content,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from atom.entrypoints.openai.validation import decode_body, own_field_names, own_name
from atom.model_engine.outputs import RequestOutput

API_VERSION = "2023-06-01"

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}
# Fields of the chat API, in which its core speaks, by what they are here.
_FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


def is_anthropic_path(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_error(status: int, message: str, request_id: str) -> p.AnthropicError:
    """An error as Anthropic's clients expect it."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return p.AnthropicError(p.AnthropicErrorObject(kind, message), request_id)


class AnthropicReply(Reply):
    def __init__(self, scope: Scope, send: Send):
        super().__init__(scope, send)
        self.headers |= {"request-id": self.request_id, "anthropic-version": API_VERSION}

    def error_body(self, status: int, body: ErrorBody) -> p.AnthropicError:
        return anthropic_error(status, body.error.message, self.request_id)

    def error_frame(self, status: int, body: ErrorBody) -> bytes:
        return event_frame(self.error_body(status, body))


class MessageWriter(AnswerWriter):
    """The shape of a message: blocks of thinking, text and calls, one open at a time."""

    def __init__(self, chat: PreparedChat, model: str, shows_thinking: bool):
        super().__init__(1)
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self._model = model
        self._shows_thinking = shows_thinking
        self._reader = chat.readers()[0]
        self._is_started = False
        self._num_blocks = 0
        self._open: str | None = None  # type of the block that is being written
        self._stop = p.StopDelta("end_turn", None)

    def events(self, batch: list[RequestOutput], generation: Generation) -> bytes:
        frames: list[bytes] = []
        for output in batch:
            if not self._is_started:
                self._is_started = True
                message = self._message([], _usage(generation.usage), None)
                frames += [event_frame(p.MessageStart(message)), event_frame(p.Ping())]
            told = self._reader.read(output)
            for event in told:
                frames += map(event_frame, self._block_events(event))
            if not self._shows_thinking and any(isinstance(event, Reasoning) for event in told):
                frames.append(event_frame(p.Ping()))  # the client sees that something goes on
            if output.finished:
                if not self._num_blocks:
                    frames += map(event_frame, self._begin("text", p.TextBlock("")))
                frames += map(event_frame, self._end())
                self._stop = self._stop_delta(output.finish_reason, output.stop_reason)
        return b"".join(frames)

    def last_events(self, usage: Usage) -> bytes:
        return event_frame(p.MessageDelta(self._stop, _usage(usage))) + event_frame(p.MessageStop())

    def response(self, usage: Usage) -> p.MessageResponse:
        answer = self.answers[0]
        blocks = self._blocks(self._reader.read_text(answer.text, is_finished=True))
        stop = self._stop_delta(answer.finish_reason, answer.stop_reason)
        return self._message(blocks or [p.TextBlock("")], _usage(usage), stop)

    def _message(
        self, blocks: list[p.OutputBlock], usage: p.MessageUsage, stop: p.StopDelta | None
    ) -> p.MessageResponse:
        reason, sequence = (None, None) if stop is None else (stop.stop_reason, stop.stop_sequence)
        return p.MessageResponse(self.id, self._model, blocks, reason, sequence, usage)

    def _stop_delta(self, finish_reason: str | None, stop_reason: str | int | None) -> p.StopDelta:
        reason = _STOP_REASONS.get(self._reader.finish_reason(finish_reason) or "")
        if reason is None and isinstance(stop_reason, str):
            return p.StopDelta("stop_sequence", stop_reason)
        return p.StopDelta(reason or "end_turn", None)

    def _block_events(self, event: ParserEvent) -> Iterator[p.StreamEvent]:
        match event:
            case Content(text):
                if self._open != "text":
                    yield from self._begin("text", p.TextBlock(""))
                yield self._delta(p.TextDelta(text))
            case Reasoning(text) if self._shows_thinking:
                if self._open != "thinking":
                    yield from self._begin("thinking", p.ThinkingBlock("", ""))
                yield self._delta(p.ThinkingDelta(text))
            case ToolCallStart(_, call_id, name):
                yield from self._begin("tool_use", p.ToolUseBlock(call_id, name, {}))
            case ToolCallArguments(_, text):
                yield self._delta(p.InputJsonDelta(text))

    def _begin(self, kind: str, block: p.OutputBlock) -> Iterator[p.StreamEvent]:
        yield from self._end()
        self._open = kind
        self._num_blocks += 1
        yield p.ContentBlockStart(self._num_blocks - 1, block)

    def _end(self) -> Iterator[p.StreamEvent]:
        if self._open == "thinking":
            yield self._delta(p.SignatureDelta(_signature()))
        if self._open is not None:
            yield p.ContentBlockStop(self._num_blocks - 1)
        self._open = None

    def _delta(self, delta: p.Delta) -> p.ContentBlockDelta:
        return p.ContentBlockDelta(self._num_blocks - 1, delta)

    def _blocks(self, events: list[ParserEvent]) -> list[p.OutputBlock]:
        """The blocks that the stream of a whole answer would have built."""
        blocks: list[p.OutputBlock] = []
        arguments: list[str] = []

        def close() -> None:
            if blocks and isinstance(blocks[-1], p.ToolUseBlock):
                blocks[-1].input = decoded_arguments("".join(arguments))
            arguments.clear()

        for event in events:
            for step in self._block_events(event):
                match step:
                    case p.ContentBlockStart(_, block):
                        close()
                        blocks.append(block)
                    case p.ContentBlockDelta(_, p.TextDelta(text)):
                        blocks[-1].text += text
                    case p.ContentBlockDelta(_, p.ThinkingDelta(text)):
                        blocks[-1].thinking += text
                    case p.ContentBlockDelta(_, p.InputJsonDelta(text)):
                        arguments.append(text)
        close()
        for block in blocks:
            if isinstance(block, p.ThinkingBlock):
                block.signature = _signature()
        return blocks


def _signature() -> str:
    """Clients demand one and send it back; nothing is checked by it, for the thinking is taken as it comes."""
    return base64.b64encode(os.urandom(48)).decode()


def _usage(usage: Usage) -> p.MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return p.MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class MessagesEndpoint(GenerationEndpoint):
    """The model's name is taken as it comes: clients have names of their own in mind."""

    reply_type = AnthropicReply

    async def prepare(self, body: bytes) -> Job:
        context = self.context
        request, ignored = decode_body(
            body, p.MessagesRequest, ignored=p.IGNORED_MESSAGES, strict=context.strict_fields
        )
        if request.thinking is not None and request.thinking.budget_tokens is not None:
            ignored.append("thinking.budget_tokens")
        with own_field_names(_FIELD_NAMES):
            chat = await prepare_chat(context, make_chat_request(request))
        chat.ignored = [own_name(name, _FIELD_NAMES) for name in chat.ignored]
        writer = MessageWriter(chat, context.served_model_name, shows_thinking(request))
        return chat.job(writer, writer.id, ignored)


class CountTokensEndpoint(JsonEndpoint):
    reply_type = AnthropicReply

    async def answer(self, body: bytes) -> p.CountTokensResponse:
        request, _ = decode_body(
            body, p.CountTokensRequest, ignored=p.IGNORED_MESSAGES, strict=self.context.strict_fields
        )
        with own_field_names(_FIELD_NAMES):
            rendered = await render(self.context, make_chat_request(request))
        return p.CountTokensResponse(len(rendered.ids))
