"""A server on a real socket, in a thread of the test process."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from atom.entrypoints.openai.context import ServerContext, make_context
from atom.entrypoints.openai.serving import HttpServer
from atom.entrypoints.openai.sockets import bind_socket, socket_url
from tests.helpers.fake_engine import FakeEngine


class LiveServer:
    """Serves ``engine`` until ``stop``; ``exit_code`` is what the process would return."""

    def __init__(self, engine: FakeEngine, **context_options: Any):
        self.engine = engine
        self.context: ServerContext = make_context(engine, **context_options)
        self.exit_code: int | None = None
        sock = bind_socket("127.0.0.1", 0)
        self.url = socket_url(sock)
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

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def wait_for(condition: Callable[[], bool], timeout_s: float = 1.0) -> bool:
    """Whether ``condition`` came true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()
