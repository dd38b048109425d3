"""How the front end reaches an engine core: in another process, or (tests, scripts) in this one.

Both clients have one surface, so that everything above them is the same code.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from atom.config import Config
from atom.model_engine.messages import Abort, AddRequests, Failed, FromEngine, Shutdown, ToEngine, Utility
from atom.runtime.liveness import Health


class EngineClient(ABC):
    """One engine core. ``receive`` is for one thread; ``send`` and ``send_control`` may be called from any."""

    @abstractmethod
    def send(self, message: AddRequests | Abort) -> None:
        """Hand over new requests or end some, in the order of calls. Raises EngineDeadError."""

    @abstractmethod
    def send_control(self, message: Utility | Shutdown) -> None:
        """What waits for no prompt on its way."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[FromEngine]:
        """What the engine has to say; waits up to ``timeout_s`` seconds. Raises EngineDeadError once it is gone
        and everything it said has been received."""

    @abstractmethod
    def health(self) -> Health:
        """The truth about the engine, without asking it."""

    @abstractmethod
    def stop(self, deadline: float) -> None:
        """End the engine by ``deadline`` (``time.monotonic()``), by force if need be. Idempotent."""


class InProcessClient(EngineClient):
    """Runs the core inside ``receive``: one thread computes, the process stays single.

    Args:
        make_core: builds and starts the core; given the function that emits messages.
    """

    def __init__(self, config: Config, make_core: Callable[[Config, Callable[[FromEngine], None]], "object"]):
        self._config = config
        self._make_core = make_core
        self._core = None
        self._inbox: deque[ToEngine] = deque()
        self._outbox: list[FromEngine] = []
        self._wake = threading.Event()
        self._stopped = False

    def send(self, message: ToEngine) -> None:
        self._inbox.append(message)
        self._wake.set()

    send_control = send

    def receive(self, timeout_s: float) -> list[FromEngine]:
        if self._core is None and not self._stopped:
            self._core = self._start_core()
        core = self._core
        if core is None:
            time.sleep(min(timeout_s, 0.01))
        else:
            if not (self._inbox or core.has_work or self._outbox) and not self._wake.wait(timeout_s):
                core.rest()
            self._wake.clear()
            while self._inbox:
                core.handle(self._inbox.popleft())
            if core.has_work:
                core.step()
        messages, self._outbox = self._outbox, []
        return messages

    def _start_core(self):
        try:
            return self._make_core(self._config, self._emit)
        except Exception as error:
            self._outbox.append(Failed(type(error).__name__, str(error)))
            self._stopped = True
            return None

    def _emit(self, message: FromEngine) -> None:
        self._outbox.append(message)

    def health(self) -> Health:
        state = "dead" if self._stopped else ("ready" if self._core is not None else "starting")
        return Health(state == "ready", state, "" if state == "ready" else f"the engine is {state}", 0.0, 0)

    def stop(self, deadline: float) -> None:
        self._stopped = True
        core, self._core = self._core, None
        if core is not None:
            core.handle(Shutdown())
            core.close()
