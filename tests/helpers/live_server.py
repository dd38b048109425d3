"""A server on a real socket, in a thread of the test process."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from atom.entrypoints.openai.context import ServerContext, make_context
from atom.entrypoints.openai.request_log import RequestLog
from atom.entrypoints.openai.serving import HttpServer
from atom.entrypoints.openai.settings import ServerSettings, add_settings_args
from atom.entrypoints.openai.sockets import bind_socket, socket_url
from atom.runtime.tracing import RequestTracer
from atom.utils.cli_parser import FlexibleArgumentParser
from tests.helpers.fake_engine import FakeEngine


class LiveServer:
    """Serves ``engine`` until ``stop``; ``exit_code`` is what the process would return.

    Args:
        flags: of the groups that protect and observe the server.
    """

    def __init__(
        self,
        engine: FakeEngine,
        *flags: str,
        tracer: RequestTracer | None = None,
        request_log: RequestLog | None = None,
        **context_options: Any,
    ):
        self.engine = engine
        self.context: ServerContext = make_context(engine, **context_options)
        settings = settings_of(*flags)
        self.context.observe_with(settings, tracer, request_log)
        self.exit_code: int | None = None
        sock = bind_socket("127.0.0.1", 0)
        self.url = socket_url(sock, "http" if settings.tls is None else "https")
        started = threading.Event()

        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.http = HttpServer(self.context, sock, access_log=False)
            asyncio.get_running_loop().call_later(0.02, started.set)
            self.exit_code = await self.http.serve()

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        self._thread.start()
        started.wait(5)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on the server's event loop and return its result."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(5)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.call(self.http.stop)
        self._thread.join(10)
        self.context.close()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def settings_of(*flags: str) -> ServerSettings:
    """What the command line makes of ``flags``."""
    parser = add_settings_args(FlexibleArgumentParser())
    return ServerSettings.from_cli_args(parser.parse_args(list(flags)))


def wait_for(condition: Callable[[], bool], timeout_s: float = 1.0) -> bool:
    """Whether ``condition`` came true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()
