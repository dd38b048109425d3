"""The life of the HTTP server: listen, drain on a signal, leave when the engine dies.

SIGTERM or SIGINT   new requests get 503, running ones have ``ATOM_SHUTDOWN_TIMEOUT_S`` to end, then their
                    streams end with an error event; exit code 0
a second signal     the running ones end now
the engine dies     the same with the reason of its death, after a moment in which /health tells; exit code 1
"""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from atom.entrypoints.openai.app import make_app
from atom.entrypoints.openai.connection import BoundedProtocol
from atom.entrypoints.openai.context import ServerContext
from atom.entrypoints.openai.errors import ServerUnavailableError
from atom.entrypoints.openai.sockets import is_loopback, socket_url
from atom.errors import EngineDeadError
from atom.runtime.startup_phases import format_phases
from atom.utils import envs
from atom.utils.gc_utils import ReclaimWatch, freeze_heap, unfreeze_heap

logger = logging.getLogger("atom.server")

BACKLOG = 2048
LAST_WORDS_S = 2.0  # for error events to reach clients that read
DEATH_NOTICE_S = 1.0  # /health tells 503 for this long before the process leaves
EXIT_STOPPED = 0
EXIT_ENGINE_DEAD = 1


class _UvicornServer(uvicorn.Server):
    """uvicorn without its own signal handlers: it would close the listener while streams still run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves ``context`` on ``sock`` until a signal or the engine's death. Does not own the engine."""

    def __init__(
        self,
        context: ServerContext,
        sock: socket.socket,
        *,
        keep_alive_s: int = 5,
        access_log: bool = True,
        on_ready: Callable[[], None] | None = None,
    ):
        self._context = context
        self._on_ready = on_ready
        tls = context.settings.tls
        self._scheme = "http" if tls is None else "https"
        self._sock = sock
        config = uvicorn.Config(
            make_app(context),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=access_log,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=1,
            **({} if tls is None else tls.uvicorn_options()),
        )
        self._server = _UvicornServer(config)
        self._num_signals = 0
        self._is_dead = False
        self._changed = asyncio.Event()

    def run(self) -> int:
        """Serve; returns the exit code. Blocks."""
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(self.serve())

    async def serve(self) -> int:
        """:meth:`run` on the running loop. Handles signals only on the main thread."""
        loop = asyncio.get_running_loop()
        has_signals = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if has_signals else ():
            loop.add_signal_handler(number, self.stop)
        self._context.engine.on_death(lambda: loop.call_soon_threadsafe(self._on_death))
        if self._context.engine.health().state == "dead":
            self._on_death()  # before anybody listened
        serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        refreshing = asyncio.create_task(self._refresh_metrics())
        try:
            while not (self._server.started or serving.done()):
                await asyncio.sleep(0.001)
            if self._server.started:
                self._tell_ready()
            await self._until(lambda: self._num_signals > 0 or self._is_dead or serving.done())
            if self._is_dead:
                await self._leave_dead()
            else:
                await self._drain()
        finally:
            refreshing.cancel()
            self._server.should_exit = True
            await serving
            for number in (signal.SIGINT, signal.SIGTERM) if has_signals else ():
                loop.remove_signal_handler(number)
        return EXIT_ENGINE_DEAD if self._is_dead else EXIT_STOPPED

    def _tell_ready(self) -> None:
        context = self._context
        if self._on_ready is not None:
            self._on_ready()
        if context.phases:
            logger.info("start: %s", format_phases(context.phases))
        url = socket_url(self._sock, self._scheme)
        if not (context.settings.clients or is_loopback(self._sock)):
            logger.warning("%s can be reached from other machines and asks for no key (--api-key)", url)
        logger.info("ready: %s serves %s", url, context.served_model_name)

    def stop(self) -> None:
        """What a signal does: the first call drains, the second ends at once."""
        self._num_signals += 1
        self._changed.set()

    def _on_death(self) -> None:
        self._is_dead = True
        self._changed.set()

    async def _until(self, condition, timeout_s: float | None = None) -> bool:
        """Whether ``condition`` came true in time; looked at when something changes, at least each 50 ms."""
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.05)
        return True

    async def _drain(self) -> None:
        inflight = self._context.inflight
        timeout = envs.ATOM_SHUTDOWN_TIMEOUT_S
        inflight.close("The server is stopping")
        if len(inflight):
            logger.info("stopping: %d requests have %g s to end", len(inflight), timeout)
        await self._until(lambda: not len(inflight) or self._num_signals > 1 or self._is_dead, timeout)
        await self._end_requests(ServerUnavailableError("The server stopped before this request ended"))

    async def _leave_dead(self) -> None:
        reason = self._context.engine.health().reason or "the engine has ended"
        logger.error("leaving: %s", reason)
        self._context.inflight.close(reason)
        # The engine's own streams fail by themselves; what waits for something else is ended here.
        notice = asyncio.create_task(asyncio.sleep(DEATH_NOTICE_S))
        await self._until(lambda: not len(self._context.inflight), 0.2)
        await self._end_requests(EngineDeadError(reason))
        await notice

    async def _end_requests(self, error: Exception) -> None:
        self._context.inflight.stop_all(error)
        await self._context.inflight.wait_idle(LAST_WORDS_S)

    async def _refresh_metrics(self) -> None:
        watch = ReclaimWatch()
        while True:
            self._context.metrics.refresh()
            watch.check()
            await asyncio.sleep(envs.ATOM_METRICS_UPDATE_INTERVAL_S)


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def share_log_handlers(access_log: bool) -> None:
    """uvicorn's warnings and access lines in the form of all others."""
    handlers = logging.getLogger("atom").handlers
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        log = logging.getLogger(name)
        log.handlers, log.propagate = list(handlers), False
        log.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = not access_log


def serve(
    context: ServerContext,
    sock: socket.socket,
    *,
    keep_alive_s: int = 5,
    access_log: bool = True,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Serve until told to stop or the engine dies; the exit code of the process.

    Args:
        on_ready: called once, when the port is open.
    """
    share_log_handlers(access_log)
    server = HttpServer(context, sock, keep_alive_s=keep_alive_s, access_log=access_log, on_ready=on_ready)
    freeze_heap()
    try:
        return server.run()
    finally:
        unfreeze_heap()
