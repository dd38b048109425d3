"""POST /v1/responses: OpenAI's Responses API, stateless. Also /v1/responses/input_tokens."""

from atom.entrypoints.openai import responses_protocol as p
from atom.entrypoints.openai.chat_core import prepare_chat, render
from atom.entrypoints.openai.endpoint import GenerationEndpoint
from atom.entrypoints.openai.errors import ErrorBody
from atom.entrypoints.openai.generation import Job
from atom.entrypoints.openai.http import Reply
from atom.entrypoints.openai.protocol import ChatCompletionRequest
from atom.entrypoints.openai.responses_chat import FIELD_NAMES, fields_without_effect, make_chat_request
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
    request, ignored = decode_body(body, p.ResponsesRequest, ignored=p.IGNORED_RESPONSES, strict=is_strict)
    check_supported(request, p.UNSUPPORTED_RESPONSES)
    check_model(request.model, model)
    chat = make_chat_request(request)
    check_shared(chat)
    return request, chat, ignored + fields_without_effect(request)


class ResponsesEndpoint(GenerationEndpoint):
    reply_type = ResponsesReply

    async def prepare(self, body: bytes) -> Job:
        context = self.context
        request, chat_request, ignored = _decode(body, context.served_model_name, context.strict_fields)
        with own_field_names(FIELD_NAMES):
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
        _, chat_request, _ = _decode(body, context.served_model_name, context.strict_fields)
        with own_field_names(FIELD_NAMES):
            rendered = await render(context, chat_request)
        return p.InputTokens(len(rendered.ids))
