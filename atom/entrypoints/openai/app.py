"""The routes of the server and the application made of them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import atom
from atom.entrypoints.openai import protocol
from atom.entrypoints.openai.chat import ChatEndpoint
from atom.entrypoints.openai.completions import CompletionsEndpoint
from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.errors import describe_http_exception
from atom.entrypoints.openai.http import Reply, RequestIdMiddleware
from atom.entrypoints.openai.metrics import CONTENT_TYPE
from atom.entrypoints.openai.openapi import Operation, make_document
from atom.entrypoints.openai.validation import check_model


@dataclass(frozen=True)
class JsonEndpoint:
    """An ASGI application that answers a bodiless request with what ``handler`` returns: value and status."""

    handler: Callable[[Scope], Awaitable[tuple[Any, int]]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        try:
            value, status = await self.handler(scope)
            await reply.json(value, status)
        except Exception as error:
            await reply.fail(error)


class InfoEndpoints:
    """The routes that tell about the server; none of them asks the engine process or takes a request slot."""

    def __init__(self, context: ServerContext):
        self._context = context
        self._document: bytes | None = None

    async def health(self, scope: Scope) -> tuple[Any, int]:
        closing = self._context.inflight.closing_reason
        if closing is not None:
            return protocol.HealthStatus("unavailable", closing), 503
        health = self._context.engine.health()
        if health.ok:
            return protocol.HealthStatus("ok"), 200
        return protocol.HealthStatus(health.state, health.reason), 503

    async def models(self, scope: Scope) -> tuple[Any, int]:
        return protocol.ModelList([self._card()]), 200

    async def model(self, scope: Scope) -> tuple[Any, int]:
        check_model(scope["path_params"]["model_id"], self._context.served_model_name)
        return self._card(), 200

    def _card(self) -> protocol.ModelCard:
        context = self._context
        return protocol.ModelCard(
            context.served_model_name, context.created, max_model_len=context.engine.max_model_len
        )

    async def version(self, scope: Scope) -> tuple[Any, int]:
        return protocol.Version(atom.__version__), 200

    async def server_info(self, scope: Scope) -> tuple[Any, int]:
        config = self._context.engine.config
        return {
            "model_id": str(config.model),
            "served_model_name": self._context.served_model_name,
            "tp_size": config.tensor_parallel_size,
            "dp_size": config.parallel_config.data_parallel_size,
            "version": atom.__version__,
            "max_model_len": self._context.engine.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "vocab_size": self._context.engine.vocab_size,
            "has_chat_template": self._context.chat_template is not None,
            **self._context.engine.info(),
        }, 200

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        try:
            metrics = self._context.metrics
            metrics.refresh()
            text = await asyncio.get_running_loop().run_in_executor(None, metrics.render)
            await reply.raw(text, CONTENT_TYPE)
        except Exception as error:
            await reply.fail(error)

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        try:
            if self._document is None:
                operations = [operation for operation, _ in make_routes(self._context)]
                self._document = msgspec.json.encode(make_document(operations))
            await reply.raw(self._document, "application/json")
        except Exception as error:
            await reply.fail(error)


class RawEndpoint:
    """Makes a method an ASGI application; the router would take a bare method for a request handler."""

    def __init__(self, function: Callable[[Scope, Receive, Send], Awaitable[None]]):
        self._function = function

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._function(scope, receive, send)


def make_routes(context: ServerContext) -> list[tuple[Operation, Any]]:
    """Every route with what the OpenAPI document says of it."""
    info = InfoEndpoints(context)
    get = ("GET", "HEAD")
    return [
        (
            Operation(
                "/v1/completions",
                ("POST",),
                "Continue a text",
                protocol.CompletionRequest,
                protocol.CompletionResponse,
                protocol.CompletionResponse,
            ),
            CompletionsEndpoint(context),
        ),
        (
            Operation(
                "/v1/chat/completions",
                ("POST",),
                "Answer a conversation",
                protocol.ChatCompletionRequest,
                protocol.ChatCompletionResponse,
                protocol.ChatCompletionChunk,
            ),
            ChatEndpoint(context),
        ),
        (
            Operation("/v1/models", get, "The model that is served", response=protocol.ModelList),
            JsonEndpoint(info.models),
        ),
        (
            Operation("/v1/models/{model_id:path}", get, "One model", response=protocol.ModelCard),
            JsonEndpoint(info.model),
        ),
        (
            Operation("/health", get, "Whether requests can be answered now", response=protocol.HealthStatus),
            JsonEndpoint(info.health),
        ),
        (
            Operation("/metrics", get, "Prometheus metrics", media_type="text/plain"),
            RawEndpoint(info.metrics),
        ),
        (
            Operation(
                "/server_info", get, "Model, parallel layout, device and limits", response=dict[str, Any]
            ),
            JsonEndpoint(info.server_info),
        ),
        (
            Operation("/version", get, "Version of the server", response=protocol.Version),
            JsonEndpoint(info.version),
        ),
        (
            Operation("/openapi.json", get, "This document", response=dict[str, Any]),
            RawEndpoint(info.openapi),
        ),
    ]


async def _on_http_exception(request: Any, error: Exception) -> Any:
    """The router's own refusals, in the form of every other error."""
    if not isinstance(error, HTTPException):
        raise error
    status, body, headers = describe_http_exception(error, request.method, request.url.path)

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        await Reply(scope, send).json(body, status, headers)

    return respond


def make_app(context: ServerContext) -> Starlette:
    """The ASGI application of a server."""
    routes = [
        Route(operation.path, endpoint, methods=list(operation.methods))
        for operation, endpoint in make_routes(context)
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(RequestIdMiddleware)],
        exception_handlers={HTTPException: _on_http_exception},
    )
