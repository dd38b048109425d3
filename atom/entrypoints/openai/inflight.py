"""Requests in flight: who may start, who has left, and how all of them end."""

import asyncio
from types import TracebackType

from starlette.types import Receive

from atom.entrypoints.openai.errors import ClientDisconnectedError, ServerUnavailableError


class InflightRequests:
    """Every request that is being answered. Lives on the event loop; not thread-safe."""

    def __init__(self) -> None:
        self._guards: set[Guard] = set()
        self._refusal: Exception | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._guards)

    @property
    def closing_reason(self) -> str | None:
        """Why new requests are refused; None while they are not."""
        return None if self._refusal is None else str(self._refusal)

    def check_open(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def close(self, reason: str) -> None:
        """Refuse new requests from now on; the running ones go on."""
        self._refusal = ServerUnavailableError(reason)

    def stop_all(self, error: Exception) -> None:
        """End every running request with ``error``."""
        for guard in list(self._guards):
            guard.stop(error)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether the last request ended within ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def guard(self, receive: Receive) -> "Guard":
        """``async with`` around the work of one request whose body has been read.

        The work is cancelled when its client leaves (raises ClientDisconnectedError) or when the server stops
        it (raises what ``stop_all`` was given).
        """
        self.check_open()
        return Guard(self, receive)

    def _add(self, guard: "Guard") -> None:
        self._guards.add(guard)
        self._idle.clear()

    def _remove(self, guard: "Guard") -> None:
        self._guards.discard(guard)
        if not self._guards:
            self._idle.set()


class Guard:
    """See :meth:`InflightRequests.guard`."""

    def __init__(self, owner: InflightRequests, receive: Receive):
        self._owner = owner
        self._receive = receive
        self._error: Exception | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a guard needs a running task")
        self._task = task
        self._watch = asyncio.create_task(self._wait_for_disconnect())
        self._owner._add(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        self._owner._remove(self)
        if self._error is not None and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._error from None

    def stop(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientDisconnectedError())
