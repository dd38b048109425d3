"""POST /tokenize and /detokenize: the tokenizer as requests meet it."""

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec
from starlette.types import Receive, Scope, Send

from atom.entrypoints.openai.chat_core import render
from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.errors import ClientDisconnectedError
from atom.entrypoints.openai.http import Reply, read_json_body
from atom.entrypoints.openai.limits import MAX_DETOKENIZE
from atom.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from atom.entrypoints.openai.validation import check_model, check_token_ids, decode_body, require
from atom.errors import RequestError


class JsonEndpoint(ABC):
    """An ASGI application that answers a JSON body with JSON."""

    reply_type: ClassVar[type[Reply]] = Reply

    def __init__(self, context: ServerContext):
        self.context = context

    @abstractmethod
    async def answer(self, body: bytes) -> msgspec.Struct:
        """Raises RequestError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self.reply_type(scope, send)
        try:
            await reply.json(await self.answer(await read_json_body(scope, receive)))
        except ClientDisconnectedError:
            pass
        except Exception as error:
            await reply.fail(error)


class TokenizeEndpoint(JsonEndpoint):
    async def answer(self, body: bytes) -> TokenizeResponse:
        context = self.context
        request, _ = decode_body(body, TokenizeRequest, strict=context.strict_fields)
        check_model(request.model, context.served_model_name)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("Either prompt or messages must be given, and not both", param="prompt")
        tokenizer = context.engine.tokenizer
        if request.messages is not None:
            if request.add_special_tokens:
                raise RequestError(
                    "add_special_tokens must be false with messages: the chat template writes them, got true",
                    param="add_special_tokens",
                )
            ids = (await render(context, _as_chat(request))).ids
        else:
            loop = asyncio.get_running_loop()
            adds = request.add_special_tokens is not False
            ids = await loop.run_in_executor(context.executor, tokenizer.encode, request.prompt, adds)
        texts = [tokenizer.id_to_token(i) or "" for i in ids] if request.return_token_strs else None
        return TokenizeResponse(len(ids), context.engine.max_model_len, ids, texts)


def _as_chat(request: TokenizeRequest) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        messages=request.messages or [],
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        chat_template_kwargs=request.chat_template_kwargs,
    )


class DetokenizeEndpoint(JsonEndpoint):
    async def answer(self, body: bytes) -> DetokenizeResponse:
        context = self.context
        request, _ = decode_body(body, DetokenizeRequest, strict=context.strict_fields)
        check_model(request.model, context.served_model_name)
        count = len(request.tokens)
        require(count <= MAX_DETOKENIZE, "tokens", f"at most {MAX_DETOKENIZE} token ids", count)
        check_token_ids("tokens", request.tokens, context.engine.vocab_size)

        def work() -> str:
            return context.engine.tokenizer.decode(request.tokens, skip_special_tokens=False)

        return DetokenizeResponse(await asyncio.get_running_loop().run_in_executor(context.executor, work))
