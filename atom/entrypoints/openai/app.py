"""The routes of the server and the application made of them."""

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from atom.entrypoints.openai import anthropic_protocol, protocol, responses_protocol
from atom.entrypoints.openai.anthropic import (
    AnthropicReply,
    CountTokensEndpoint,
    MessagesEndpoint,
    is_anthropic_path,
)
from atom.entrypoints.openai.chat import ChatEndpoint
from atom.entrypoints.openai.completions import CompletionsEndpoint
from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.debug import told_gc_census
from atom.entrypoints.openai.errors import describe_http_exception
from atom.entrypoints.openai.http import Reply
from atom.entrypoints.openai.info import InfoEndpoint, InfoHandlers, Told
from atom.entrypoints.openai.middleware import make_middleware
from atom.entrypoints.openai.openapi import Operation, make_document
from atom.entrypoints.openai.responses import InputTokensEndpoint, ResponsesEndpoint
from atom.entrypoints.openai.tokenization import DetokenizeEndpoint, TokenizeEndpoint

_GET, _POST = ("GET", "HEAD"), ("POST",)


def make_routes(context: ServerContext) -> list[tuple[Operation, ASGIApp]]:
    """Every route with what the OpenAPI document says of it."""
    p, a, r, info = protocol, anthropic_protocol, responses_protocol, InfoHandlers(context)
    completions = Operation(
        "/v1/completions",
        _POST,
        "Continue a text",
        request=p.CompletionRequest,
        response=p.CompletionResponse,
        event=p.CompletionResponse,
    )
    chat = Operation(
        "/v1/chat/completions",
        _POST,
        "Answer a conversation",
        request=p.ChatCompletionRequest,
        response=p.ChatCompletionResponse,
        event=p.ChatCompletionChunk,
    )

    def tell(path: str, summary: str, handler: Any, response: Any = None, **more: Any) -> tuple:
        return Operation(path, more.pop("methods", _GET), summary, response=response, **more), InfoEndpoint(
            handler
        )

    routes = [
        (completions, CompletionsEndpoint(context)),
        (chat, ChatEndpoint(context)),
        (
            Operation(
                "/v1/responses",
                _POST,
                "Answer a conversation, as items",
                request=r.ResponsesRequest,
                response=r.ResponseObject,
                event=r.ResponseStreamEvent,
            ),
            ResponsesEndpoint(context),
        ),
        (
            Operation(
                "/v1/responses/input_tokens",
                _POST,
                "Prompt tokens that such a conversation has",
                request=r.ResponsesRequest,
                response=r.InputTokens,
            ),
            InputTokensEndpoint(context),
        ),
        (
            Operation(
                "/v1/messages",
                _POST,
                "Answer a conversation, in Anthropic's form",
                request=a.MessagesRequest,
                response=a.MessageResponse,
                event=a.StreamEvent,
                error=a.AnthropicError,
            ),
            MessagesEndpoint(context),
        ),
        (
            Operation(
                "/v1/messages/count_tokens",
                _POST,
                "Prompt tokens that such a conversation has",
                request=a.CountTokensRequest,
                response=a.CountTokensResponse,
                error=a.AnthropicError,
            ),
            CountTokensEndpoint(context),
        ),
        (
            Operation(
                "/tokenize",
                _POST,
                "Token ids of a prompt or of messages",
                request=p.TokenizeRequest,
                response=p.TokenizeResponse,
            ),
            TokenizeEndpoint(context),
        ),
        (
            Operation(
                "/detokenize",
                _POST,
                "Text of token ids",
                request=p.DetokenizeRequest,
                response=p.DetokenizeResponse,
            ),
            DetokenizeEndpoint(context),
        ),
        tell("/tokenizer_info", "Special tokens and chat template", info.tokenizer_info, p.TokenizerInfo),
        tell("/v1/models", "The model that is served", info.models, p.ModelList),
        tell("/v1/models/{model_id:path}", "One model", info.model, p.ModelCard),
        tell("/health", "Whether requests can be answered now", info.health, p.HealthStatus),
        tell("/metrics", "Prometheus metrics", info.metrics, media_type="text/plain"),
        tell("/server_info", "Model, parallel layout, device and limits", info.server_info, dict[str, Any]),
        tell("/version", "Version of the server", info.version, p.Version),
        tell("/debug/cache_stats", "What the prefix cache has saved", info.cache_stats, dict[str, Any]),
        tell("/debug/gc_census", "What the garbage collector tracks", told_gc_census, dict[str, Any]),
    ]
    if context.engine.config.torch_profiler_dir:
        for path, summary, handler in (
            ("/start_profile", "Start the profiler", info.start_profile),
            ("/stop_profile", "Stop the profiler; paths of its traces", info.stop_profile),
        ):
            routes.append(tell(path, summary, handler, dict[str, Any], methods=_POST))
    document: list[bytes] = []

    async def openapi(scope: Scope) -> Told:
        if not document:
            document.append(msgspec.json.encode(make_document([operation for operation, _ in routes])))
        return Told(document[0])

    routes.append(tell("/openapi.json", "This document", openapi, dict[str, Any]))
    return routes


async def _on_http_exception(request: Request, error: Exception) -> ASGIApp:
    """The router's own refusals, in the form of every other error."""
    if not isinstance(error, HTTPException):
        raise error
    status, body, headers = describe_http_exception(error, request.method, request.url.path)

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        reply = (AnthropicReply if is_anthropic_path(request.url.path) else Reply)(scope, send)
        await reply.json(reply.error_body(status, body), status, headers)

    return respond


def make_app(context: ServerContext) -> Starlette:
    """The ASGI application of a server."""
    app = Starlette(
        routes=[
            Route(operation.path, endpoint, methods=list(operation.methods))
            for operation, endpoint in make_routes(context)
        ],
        middleware=make_middleware(context),
        exception_handlers={HTTPException: _on_http_exception},
    )
    app.router.redirect_slashes = False  # a redirect would be built from the client's Host header
    return app
