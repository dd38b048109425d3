"""The way of every generating request: read, prepare, run, answer."""

import time
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import ClassVar

from starlette.types import Receive, Scope, Send

from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.errors import ClientDisconnectedError
from atom.entrypoints.openai.generation import Generation, Job
from atom.entrypoints.openai.http import Reply, logger, read_json_body
from atom.errors import QueueFullError


class GenerationEndpoint(ABC):
    """An ASGI application for one route."""

    reply_type: ClassVar[type[Reply]] = Reply

    def __init__(self, context: ServerContext):
        self.context = context

    @abstractmethod
    async def prepare(self, body: bytes) -> Job:
        """Decode, check and tokenize. Raises RequestError for anything that cannot run."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = time.monotonic()
        reply = self.reply_type(scope, send)
        try:
            self.context.inflight.check_open()
            body = await read_json_body(scope, receive)
            async with self.context.inflight.guard(receive):
                job = await self.prepare(body)
                logger.debug("%s: runs as %s", reply.request_id, job.request_id)
                if job.ignored:
                    reply.headers["x-atom-warning"] = f"ignored fields: {', '.join(job.ignored)}"
                await self._answer(job, reply, arrival)
        except ClientDisconnectedError:
            logger.debug("%s: the client left", reply.request_id)
        except Exception as error:
            if isinstance(error, QueueFullError):
                self.context.metrics.count_rejected()
            await reply.fail(error)

    async def _answer(self, job: Job, reply: Reply, arrival: float) -> None:
        generation = Generation(self.context, job, arrival)
        writer = job.writer
        async with aclosing(generation.outputs()) as batches:
            async for batch in batches:
                if not job.is_streamed:
                    writer.collect(batch)
                    continue
                events = writer.events(batch, generation)
                if generation.is_finished:
                    await reply.end(events + writer.last_events(generation.usage))
                elif events:
                    await reply.write(events)
        if not job.is_streamed:
            await reply.json(writer.response(generation.usage))
