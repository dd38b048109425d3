"""Routes that tell about the server or act on it as a whole. Only the profiler's ask the engine process."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

import atom
from atom.entrypoints.openai import protocol
from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.http import Reply
from atom.entrypoints.openai.metrics import CONTENT_TYPE
from atom.entrypoints.openai.validation import check_model
from atom.errors import AtomError
from atom.model_engine.llm_engine import TRACES_LATE
from atom.utils import envs


@dataclass(frozen=True, slots=True)
class Told:
    """An answer: a value to encode as JSON, or bytes of ``content_type``."""

    value: Any
    status: int = 200
    content_type: str = "application/json"


@dataclass(frozen=True)
class InfoEndpoint:
    """An ASGI application that answers a request without a body with what ``handler`` returns."""

    handler: Callable[[Scope], Awaitable[Told]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        try:
            told = await self.handler(scope)
            if isinstance(told.value, bytes):
                await reply.raw(told.value, told.content_type, told.status)
            else:
                await reply.json(told.value, told.status)
        except Exception as error:
            await reply.fail(error)


class InfoHandlers:
    """What the routes answer."""

    def __init__(self, context: ServerContext):
        self._context = context

    async def health(self, scope: Scope) -> Told:
        health = self._context.engine.health()
        if not health.ok:
            return Told(protocol.HealthStatus(health.state, health.reason), 503)
        closing = self._context.inflight.closing_reason
        if closing is not None:
            return Told(protocol.HealthStatus("stopping", closing), 503)
        return Told(protocol.HealthStatus("ok"))

    async def models(self, scope: Scope) -> Told:
        return Told(protocol.ModelList([self._card()]))

    async def model(self, scope: Scope) -> Told:
        check_model(scope["path_params"]["model_id"], self._context.served_model_name)
        return Told(self._card())

    def _card(self) -> protocol.ModelCard:
        context = self._context
        return protocol.ModelCard(
            context.served_model_name, context.created, max_model_len=context.engine.max_model_len
        )

    async def version(self, scope: Scope) -> Told:
        return Told(protocol.Version(atom.__version__))

    async def server_info(self, scope: Scope) -> Told:
        engine, config = self._context.engine, self._context.engine.config
        return Told(
            {
                "model_id": str(config.model),
                "served_model_name": self._context.served_model_name,
                "tp_size": config.tensor_parallel_size,
                "dp_size": config.parallel_config.data_parallel_size,
                "version": atom.__version__,
                "max_model_len": engine.max_model_len,
                "max_num_seqs": config.max_num_seqs,
                "vocab_size": engine.vocab_size,
                "has_chat_template": self._context.chat_template is not None,
                **engine.info(),
                "startup_phases": self._context.phases,
            }
        )

    async def tokenizer_info(self, scope: Scope) -> Told:
        tokenizer, template = self._context.engine.tokenizer, self._context.chat_template
        source = None if template is None else template.source
        return Told(protocol.TokenizerInfo(tokenizer.bos_token, tokenizer.eos_token, source))

    async def metrics(self, scope: Scope) -> Told:
        metrics = self._context.metrics
        metrics.refresh()
        text = await asyncio.get_running_loop().run_in_executor(None, metrics.render)
        return Told(text, content_type=CONTENT_TYPE)

    async def cache_stats(self, scope: Scope) -> Told:
        """The newest snapshot's counts; 0 before the first."""
        engine = self._context.engine
        stats, prefix = engine.stats(), "prefix_cache_"
        return Told(
            {
                "enabled": engine.config.enable_prefix_caching,
                "requests": int(stats.get(f"{prefix}requests", 0)),
                "full_tokens": int(stats.get(f"{prefix}full_tokens", 0)),
                "cached_tokens": int(stats.get(f"{prefix}cached_tokens", 0)),
                "hit": stats.get(f"{prefix}hit_ratio", 0.0),
            }
        )

    async def start_profile(self, scope: Scope) -> Told:
        await self._context.engine.utility("start_profile")
        return Told({"status": "success", "message": "profiling"})

    async def stop_profile(self, scope: Scope) -> Told:
        timeout_s = envs.ATOM_PROFILER_TIMEOUT
        try:
            traces = await self._context.engine.utility("stop_profile", timeout_s)
        except TimeoutError:
            raise AtomError(TRACES_LATE.format(timeout_s)) from None
        return Told({"status": "success", "message": "profiling stopped", "traces": traces})
