"""CoreManager: owns the engine process, its sockets and its liveness page."""

import logging
import os
import shutil
import tempfile
import threading
import time
from dataclasses import replace

import msgspec
import zmq

from atom.config import Config
from atom.errors import EngineDeadError
from atom.model_engine.engine_client import EngineClient
from atom.model_engine.engine_process import EngineProcessConfig
from atom.model_engine.messages import Abort, AddRequests, FromEngine, Shutdown, Utility
from atom.runtime.liveness import Health, LivenessPage, ProcessState
from atom.runtime.process import ChildProcess, stop_children
from atom.runtime.transport import FrontSockets

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 120.0  # imports on a busy machine; the child connects before it loads anything
# libgomp's threads spin up to a millisecond at the end of each of the hundreds of parallel regions of a step.
# With cores to itself that costs nothing; where anything else wants a core it multiplies the step's time.
_THREAD_DEFAULTS = {"GOMP_SPINCOUNT": "20000"}
_POLL_S = 0.2  # how soon a death is noticed by the thread that reads the engine's output


class CoreManager(EngineClient):
    """Starts one EngineCore process and speaks with it.

    The process is created by the constructor, so that it imports and loads while its parent does the same.
    """

    def __init__(self, config: Config):
        self._folder = tempfile.mkdtemp(prefix="atom-")  # 0700
        self._page = LivenessPage(os.path.join(self._folder, "liveness0"), create=True)
        self._context = zmq.Context()
        self._sockets = FrontSockets(self._context, self._folder, 0, msgspec.msgpack.Decoder(FromEngine))
        self._send_lock = threading.Lock()
        self._connected = False
        self._stopping = False
        self._dead = threading.Event()
        child_config = EngineProcessConfig(config=config.to_dict(), folder=self._folder, index=0)
        self._child = ChildProcess(
            "atom.model_engine.engine_process", child_config, "EngineCore", self._on_exit, _THREAD_DEFAULTS
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def _on_exit(self, child: ChildProcess) -> None:
        self._dead.set()

    def _connect(self) -> None:
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        while not self._connected and not self._dead.is_set():
            self._connected = self._sockets.connect(_POLL_S)
            if not self._connected and time.monotonic() > deadline:
                raise EngineDeadError(f"the engine process did not connect within {_CONNECT_TIMEOUT_S:g} s")

    def send(self, message: AddRequests | Abort) -> None:
        self._check_alive()
        with self._send_lock:
            self._sockets.send(message)

    def send_control(self, message: Utility | Shutdown) -> None:
        if not self._dead.is_set():
            self._sockets.send_control(message)

    def receive(self, timeout_s: float) -> list[FromEngine]:
        if not self._connected:
            self._connect()
        messages = self._sockets.receive(min(timeout_s, _POLL_S)) if self._connected else []
        if not messages and self._dead.is_set():
            messages = self._sockets.receive(0) if self._connected else []
            if not messages:
                self._check_alive()
        return messages

    def _check_alive(self) -> None:
        if self._dead.is_set():
            raise EngineDeadError(f"the engine process has ended (exit code {self._child.returncode})")

    def health(self) -> Health:
        health = self._page.health()
        if self._dead.is_set():
            reason = f"the engine process has ended (exit code {self._child.returncode})"
            return replace(health, ok=False, state=ProcessState.DEAD.name.lower(), reason=reason)
        return health

    def stop(self, deadline: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self._connected:
            self.send_control(Shutdown())
        stop_children([self._child], deadline)
        self._sockets.close()
        self._context.term()
        self._page.close()
        shutil.rmtree(self._folder, ignore_errors=True)
