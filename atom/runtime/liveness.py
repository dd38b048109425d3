"""Telling the truth about a child process: a page of shared memory that it stamps and its parent reads.

Two things are watched. The *heartbeat* is stamped by a side thread, so it stops when the process is
stopped, swapped out or deadlocked in C code that holds the GIL. The *step deadline* is set by the engine
loop before each step in proportion to the work, so a loop that hangs while its side thread lives is
noticed too. Start-up and compilation set no deadline. Reading costs no request slot and no message.
"""

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum

_LAYOUT = struct.Struct("<qqqq")  # beat_ns, state, deadline_ns (0: none), num_steps
_FIELD = struct.Struct("<q")
_BEAT, _STATE, _DEADLINE, _STEPS = 0, 8, 16, 24

BEAT_INTERVAL_S = 0.1
HEARTBEAT_LIMIT_S = 3.0  # a busy 2-core machine can keep a thread from its turn for a second


class ProcessState(IntEnum):
    STARTING = 0
    READY = 1
    STOPPING = 2
    DEAD = 3


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine serves, and if not, why."""

    ok: bool
    state: str
    reason: str
    heartbeat_age_s: float
    num_steps: int


class LivenessPage:
    """The shared page. The parent creates it (``create=True``); the child opens it by path."""

    def __init__(self, path: str, *, create: bool = False):
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self.path = path
        if create:
            _LAYOUT.pack_into(self._map, 0, time.monotonic_ns(), ProcessState.STARTING, 0, 0)

    # -- the child writes

    def beat(self) -> None:
        _FIELD.pack_into(self._map, _BEAT, time.monotonic_ns())

    def set_state(self, state: ProcessState) -> None:
        _FIELD.pack_into(self._map, _STATE, state)

    def begin_step(self, allowance_s: float) -> None:
        """A step starts and must end within ``allowance_s`` seconds."""
        _FIELD.pack_into(self._map, _DEADLINE, time.monotonic_ns() + int(allowance_s * 1e9))

    def end_step(self, num_steps: int) -> None:
        _FIELD.pack_into(self._map, _DEADLINE, 0)
        _FIELD.pack_into(self._map, _STEPS, num_steps)

    # -- the parent reads

    def health(self) -> Health:
        beat, state, deadline, steps = _LAYOUT.unpack_from(self._map, 0)
        now = time.monotonic_ns()
        age = max(0.0, (now - beat) / 1e9)
        name = ProcessState(state).name.lower()
        reason = ""
        if state == ProcessState.STARTING:
            reason = "the engine is starting"
        elif state == ProcessState.STOPPING:
            reason = "the engine is stopping"
        elif age > HEARTBEAT_LIMIT_S:
            reason = f"no heartbeat of the engine for {age:.1f} s (limit {HEARTBEAT_LIMIT_S:g} s)"
        elif deadline and now > deadline:
            reason = f"step {steps + 1} is {(now - deadline) / 1e9:.1f} s past its deadline"
        return Health(not reason, name, reason, age, steps)

    def close(self) -> None:
        self._map.close()


class HeartbeatThread:
    """Stamps ``page`` ten times a second until stopped, and ends the process when its parent is gone."""

    def __init__(self, page: LivenessPage, parent_pid: int | None = None):
        self._page = page
        self._parent_pid = parent_pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_INTERVAL_S):
            self._page.beat()
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                os._exit(1)
