"""The process that compiles kernels: ``python -m atom.kernels.triton.compile_worker``.

It imports the kernels once, then forks for each one: a compiler that crashes takes one kernel with it, and what was
imported and hashed is there already. It never uses a device; results stay in Triton's folder.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from atom.runtime.process import die_with_parent, read_child_config, set_process_title
from atom.utils.logging import init_logger

logger = init_logger(__name__)

_NICENESS = 5  # the engine's own start comes first
# By Triton's name of a device's kind: where its driver is, and what builds the code in C that launches a kernel.
_LAUNCHERS = {
    "cuda": ("triton.backends.nvidia.driver", "CudaLauncher"),
    "hip": ("triton.backends.amd.driver", "HIPLauncher"),
}


class KernelJob(msgspec.Struct, frozen=True):
    """A kernel by name, and what Triton calls its specialization data: types, constants and options as JSON."""

    module: str
    name: str
    data: str


class KernelTarget(msgspec.Struct, frozen=True):
    """Triton's GPUTarget."""

    backend: str
    arch: int | str
    warp_size: int


class WorkerConfig(msgspec.Struct, frozen=True):
    jobs_path: str  # a JSON list of KernelJob
    num_processes: int
    target: KernelTarget


class TargetDriver:
    """What Triton asks its driver while it compiles, answered without a device."""

    def __init__(self, target: KernelTarget):
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> int:
    settings, _ = read_child_config(WorkerConfig)
    set_process_title("KernelCompiler")
    with suppress(OSError):
        os.nice(_NICENESS)
    jobs = msgspec.json.decode(Path(settings.jobs_path).read_bytes(), type=list[KernelJob])
    _prepare(settings.target, jobs)
    num_failed = compile_all(jobs, settings.num_processes, settings.target.backend)
    return 1 if num_failed else 0


def _prepare(target: KernelTarget, jobs: Sequence[KernelJob]) -> None:
    """Do once what every compilation needs: imports, and the hash of the compiler."""
    from triton.runtime import driver

    driver.set_active(TargetDriver(target))
    for module in dict.fromkeys(job.module for job in jobs):
        with suppress(ImportError):  # the jobs say so
            importlib.import_module(module)
    with suppress(Exception):
        from triton.compiler import make_backend
        from triton.runtime.cache import triton_key

        triton_key()
        make_backend(driver.active.get_current_target()).hash()


def compile_all(jobs: Sequence[KernelJob], num_processes: int, backend: str) -> int:
    """Compile ``jobs``, ``num_processes`` at a time, each in a process of its own; returns how many failed."""
    running: set[int] = set()
    num_failed = 0
    launched: set[str] = set()

    def reap() -> int:
        pid, status = os.waitpid(-1, 0)
        running.discard(pid)
        return int(status != 0)

    for job in jobs:
        while len(running) >= num_processes:
            num_failed += reap()
        # Kernels of the same signature share a launcher: the first one builds it.
        signature = _signature(job)
        builds_launcher = signature not in launched
        launched.add(signature)
        running.add(_fork(job, backend if builds_launcher else None))
    while running:
        num_failed += reap()
    return num_failed


def _signature(job: KernelJob) -> str:
    try:
        return str(list(json.loads(job.data)["signature"].values()))
    except (ValueError, LookupError, AttributeError, TypeError):
        return job.name


def _fork(job: KernelJob, backend: str | None) -> int:
    """Start a process that compiles ``job``, and its launcher for ``backend``; its exit status is 0 if it could."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _compile(job, backend)
        status = 0
    except Exception as error:  # the launch that needs the kernel says it again
        logger.warning("%s is not compiled ahead: %s: %s", job.name, type(error).__name__, str(error)[-300:])
    finally:
        os._exit(status)  # whatever happened: the loop of jobs is the parent's


def settle_key(function: Any) -> None:
    """Let Triton take the keys of what a kernel calls before the kernel's own; call it before any of them is used.

    A key holds the globals of the functions called, but only of those whose own key was taken already (Triton 3.6):
    otherwise it depends on what was compiled before, and the next process compiles again what is on disk.
    """
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if _has_key(called):
            settle_key(called)
    _ = function.cache_key


def _has_key(value: Any) -> bool:
    return hasattr(type(value), "cache_key") and hasattr(value, "fn")  # of the type: reading a key takes it


def _compile(job: KernelJob, backend: str | None) -> None:
    kernel = getattr(importlib.import_module(job.module), job.name)
    if _has_key(kernel):
        settle_key(kernel)
    compiled = kernel.preload(job.data)
    if backend in _LAUNCHERS:
        module, name = _LAUNCHERS[backend]
        # Newer versions of Triton have one launcher for all; without a driver's library there is none at all.
        with suppress(Exception):
            getattr(importlib.import_module(module), name)(compiled.src, compiled.metadata)


if __name__ == "__main__":
    sys.exit(main())
