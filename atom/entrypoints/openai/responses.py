"""POST /v1/responses: OpenAI's Responses API, stateless. Also /v1/responses/input_tokens."""

import msgspec

from atom.entrypoints.openai import responses_protocol as p
from atom.entrypoints.openai.chat_core import prepare_chat, render
from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.endpoint import GenerationEndpoint
from atom.entrypoints.openai.errors import ErrorBody
from atom.entrypoints.openai.generation import Job
from atom.entrypoints.openai.http import Reply
from atom.entrypoints.openai.protocol import ChatCompletionRequest
from atom.entrypoints.openai.responses_chat import (
    CHAT_ONLY,
    FIELD_NAMES,
    fields_without_effect,
    make_chat_request,
)
from atom.entrypoints.openai.responses_stream import ResponseWriter
from atom.entrypoints.openai.tokenization import JsonEndpoint
from atom.entrypoints.openai.validation import (
    check_model,
    check_shared,
    check_supported,
    decode_body,
    own_field_names,
    own_name,
)

ROOM_SHARE = 8  # with truncation, an answer of no stated length gets this part of the context


class ResponsesReply(Reply):
    """A stream that fails ends with the response as it has come."""

    writer: ResponseWriter | None = None  # once its request is known to be right

    def error_frame(self, status: int, body: ErrorBody) -> bytes:
        if self.writer is None:
            return super().error_frame(status, body)
        return self.writer.failed(body.error.message)


def _decode(
    body: bytes, model: str, is_strict: bool
) -> tuple[p.ResponsesRequest, ChatCompletionRequest, list[str]]:
    """The request, the chat request that it is, and its fields without effect."""
    hints = p.IGNORED_RESPONSES if is_strict else p.IGNORED_RESPONSES | CHAT_ONLY
    request, ignored = decode_body(body, p.ResponsesRequest, ignored=hints, strict=is_strict)
    check_supported(request, p.UNSUPPORTED_RESPONSES)
    check_model(request.model, model)
    chat = make_chat_request(request)
    check_shared(chat)
    return request, chat, ignored + fields_without_effect(request)


async def _shortened(context: ServerContext, chat: ChatCompletionRequest) -> ChatCompletionRequest:
    """The request without its earliest turns, as few as must go for prompt and answer to fit the context.

    Instructions stay, and what is left begins with a user's turn; the last of them stays even if it does not
    fit. An answer of no stated length gets the room of ``ROOM_SHARE``.
    """
    limit = context.engine.max_model_len
    limit -= limit // ROOM_SHARE if chat.max_completion_tokens is None else chat.max_completion_tokens
    messages = chat.messages
    num_kept = 1 if messages and messages[0].role in ("system", "developer") else 0
    turns = [i for i in range(num_kept + 1, len(messages)) if messages[i].role == "user"]
    starts = [num_kept, *turns]

    def without(start: int) -> ChatCompletionRequest:
        return msgspec.structs.replace(chat, messages=messages[:num_kept] + messages[start:])

    low, high = 0, len(starts) - 1
    middle = 0  # most conversations fit as they are
    while low < high:
        rendered = await render(context, without(starts[middle]))
        if len(rendered.ids) <= limit:
            high = middle
        else:
            low = middle + 1
        middle = (low + high) // 2
    return without(starts[low])


class ResponsesEndpoint(GenerationEndpoint):
    reply_type = ResponsesReply

    async def prepare(self, body: bytes) -> Job:
        context = self.context
        request, chat_request, ignored = _decode(body, context.served_model_name, context.strict_fields)
        with own_field_names(FIELD_NAMES):
            if request.truncation == "auto":
                chat_request = await _shortened(context, chat_request)
            chat = await prepare_chat(context, chat_request)
        chat.ignored = [own_name(name, FIELD_NAMES) for name in chat.ignored]
        writer = ResponseWriter(chat, request, context.served_model_name, context.engine.tokenizer)
        return chat.job(writer, writer.id, ignored)

    async def _answer(self, job: Job, reply: Reply, arrival: float) -> None:
        assert isinstance(reply, ResponsesReply) and isinstance(job.writer, ResponseWriter)
        reply.writer = job.writer
        await super()._answer(job, reply, arrival)


class InputTokensEndpoint(JsonEndpoint):
    async def answer(self, body: bytes) -> p.InputTokens:
        context = self.context
        request, chat_request, _ = _decode(body, context.served_model_name, context.strict_fields)
        with own_field_names(FIELD_NAMES):
            if request.truncation == "auto":
                chat_request = await _shortened(context, chat_request)
            rendered = await render(context, chat_request)
        return p.InputTokens(len(rendered.ids))
