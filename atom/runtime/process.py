"""One owner for every child process: started clean, noticed when it dies, gone when its parent is gone.

A child is a fresh interpreter (never fork: device runtimes do not survive it) that runs ``python -m
MODULE`` and reads its configuration as one JSON line from standard input, so nothing is pickled. It asks
the kernel to kill it when its parent dies, before it creates anything else.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from atom.utils import envs

_PR_SET_PDEATHSIG = 1
_KILL_GRACE_S = 1.0  # between SIGTERM and SIGKILL


class ChildProcess:
    """A child that runs ``python -m module``. ``on_exit(child)`` is called once, from a side thread.

    Args:
        module: module whose ``main`` calls :func:`read_child_config`.
        config: anything msgspec turns into JSON.
        name: process title and the name in messages.
        defaults: environment variables for the child where the user has not set them.
    """

    def __init__(
        self,
        module: str,
        config: object,
        name: str,
        on_exit: Callable[["ChildProcess"], None],
        defaults: dict[str, str] | None = None,
    ):
        self.name = name
        self._on_exit = on_exit
        env = {**(defaults or {}), **os.environ}
        root = str(Path(__file__).resolve().parents[2])  # the folder that holds the atom package
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
        # The kernel ties the death signal to the *thread* that started the child: only the main thread
        # lives as long as the process. Elsewhere the child's heartbeat thread watches its parent alone.
        arm = threading.current_thread() is threading.main_thread()
        header = {"parent_pid": os.getpid(), "arm_death_signal": arm, "config": config}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, env=env, close_fds=True
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(header) + b"\n")
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: on_exit reports it
        self._thread = threading.Thread(target=self._reap, name=f"reap-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Whether the child has ended within ``timeout_s`` seconds."""
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int) -> None:
        if self.is_alive:
            self._process.send_signal(number)

    def _reap(self) -> None:
        self._process.wait()
        self._on_exit(self)


def stop_children(children: Iterable[ChildProcess], deadline: float) -> None:
    """Wait until ``deadline`` (``time.monotonic()``) for all to end by themselves, then end them."""
    children = list(children)
    for child in children:
        child.wait(deadline - time.monotonic())
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [child for child in children if child.is_alive]
        for child in left:
            child.signal(number)
        grace = time.monotonic() + _KILL_GRACE_S
        for child in left:
            child.wait(grace - time.monotonic())


def read_child_config(type_: type) -> tuple[object, int]:
    """In a child: arm the death signal, take the configuration from standard input.

    Returns the configuration, decoded as ``type_``, and the parent's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    header = msgspec.json.decode(sys.stdin.buffer.readline())
    parent_pid = header["parent_pid"]
    die_with_parent(parent_pid, is_armed=header["arm_death_signal"])
    return msgspec.convert(header["config"], type_), parent_pid


def die_with_parent(parent_pid: int, *, is_armed: bool = True) -> None:
    """Let the kernel kill this process when the thread that made it ends; end now if the parent is gone already.

    ``is_armed`` False only looks whether it is gone.
    """
    if is_armed and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def set_process_title(name: str) -> None:
    """Show ``<prefix>::<name>`` in ps and top, where setproctitle is installed."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(f"{envs.ATOM_PROCESS_NAME_PREFIX}::{name}")
