"""Kernels compiled side by side before a step needs them: what would be launched is recorded first.

Triton compiles a kernel when it is first launched, one after the other, and its front end is Python: threads of one
process take turns. So what is recorded and is not on disk yet goes to a process of its own, which forks one for each
kernel (:mod:`atom.kernels.triton.compile_worker`) and leaves the results in Triton's folder; a launch finds them
there. Nothing depends on it: a kernel that is not there is compiled by the launch that needs it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from atom.kernels.triton.compile_worker import KernelJob, KernelTarget, WorkerConfig, settle_key
from atom.platforms import get_platform
from atom.runtime.process import ChildProcess, stop_children
from atom.utils import envs
from atom.utils.logging import init_logger

logger = init_logger(__name__)

MAX_PROCESSES = 8
PATIENCE_S = 120.0  # for all kernels; then launches compile what is missing
_MODULE = "atom.kernels.triton.compile_worker"


@dataclass
class Launch:
    """One kernel with its arguments by name and its launch options."""

    label: str
    kernel: Any
    positional: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        names = self.kernel.arg_names
        named = {k: v for k, v in self.options.items() if k in names}
        return dict(zip(names, self.positional, strict=False)) | named

    @property
    def launch_options(self) -> dict[str, Any]:
        return {k: v for k, v in self.options.items() if k not in self.kernel.arg_names}

    def compile(self, arguments: tuple[Any, ...] | None = None) -> None:
        self.kernel.warmup(*(arguments or self.positional), grid=(1,), **self.options)


def _facts(argument: Any) -> Any:
    """What of an argument decides which kernel is compiled."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):  # a tensor descriptor, whose own text has the tensor's values
        return argument.base.dtype, argument.block_shape, getattr(argument, "layout", None)
    return argument


@dataclass
class Recorder:
    """Launches instead of running them, by what distinguishes compiled kernels; ``label`` names the next ones."""

    label: str = ""
    launches: dict[str, Launch] = field(default_factory=dict)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        facts = [_facts(argument) for argument in args]
        key = f"{kernel.fn.__name__} {facts} {sorted(options.items(), key=str)}"
        self.launches.setdefault(key, Launch(self.label, kernel, args, options))


@contextmanager
def recording(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Inside, Triton launches nothing, in no thread, and a recorder keeps what it would have launched."""
    from triton.runtime.jit import JITFunction

    recorder, run = recorder or Recorder(), JITFunction.run
    JITFunction.run = lambda self, *args, **options: recorder.run(self, *args, **options)
    try:
        yield recorder
    finally:
        JITFunction.run = run


def missing_kernels(launches: Sequence[Launch]) -> list[KernelJob]:
    """What Triton would have to compile for ``launches``, each kernel once, for the current device.

    Kernels that this process has, or that are in Triton's folder, are left out, as are launches that Triton cannot
    describe: they are compiled when they are needed.
    """
    from triton import knobs

    _join_preparing()
    found: dict[str, KernelJob] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        data = compile["specialization_data"]
        if data not in found and not _is_on_disk(fn.jit_function, data):
            found[data] = KernelJob(fn.module, fn.name, data)
        return True  # do not compile

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        for launch in launches:
            try:
                settle_key(launch.kernel)
                launch.compile()
            except Exception as error:
                logger.debug("%s is not compiled ahead: %s", launch.kernel.fn.__name__, error)
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found.values())


def _is_on_disk(kernel: Any, data: str) -> bool:
    """Whether Triton's folder has the kernel; False where this version of Triton cannot be asked."""
    try:
        return _disk_cache(kernel, json.loads(data))
    except Exception as error:
        logger.debug("Triton's folder is not asked: %s: %s", type(error).__name__, error)
        return False


def _disk_cache(kernel: Any, facts: dict[str, Any]) -> bool:
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import ASTSource, compiler, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime import cache, driver

    cache_key = getattr(cache, "get_cache_key", None) or compiler.get_cache_key  # moved in Triton 3.7
    constants = dict(zip(map(tuple, facts["constant_keys"]), facts["constant_vals"], strict=True))
    attributes = dict(zip(map(tuple, facts["attrs_keys"]), facts["attrs_vals"], strict=True))
    source_class = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_class(kernel, facts["signature"], constants, attributes)
    backend = make_backend(driver.active.get_current_target())
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in facts["options"].items()}
    options = backend.parse_options(options | source.parse_options())
    key = cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    manager = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return bool(manager.get_group(f"{source.name[:150]}.json"))


class KernelCompilation:
    """Kernels on their way: ``wait`` for them before they are launched; what fails is left to the launches.

    Args:
        jobs: of :func:`missing_kernels`; without any, or without processes, nothing is started.
        num_processes: that compile at a time.
    """

    def __init__(self, jobs: Sequence[KernelJob], num_processes: int | None = None):
        self.jobs = list(jobs)
        count = default_processes() if num_processes is None else num_processes
        self.num_processes = min(count, len(self.jobs))
        self._child: ChildProcess | None = None
        self._folder: str | None = None
        self._is_complete = not self.jobs
        self._began = time.monotonic()
        if self.num_processes:
            self._start()

    def _start(self) -> None:
        try:
            self._folder = tempfile.mkdtemp(prefix="atom-kernels-")  # 0700
            path = Path(self._folder, "jobs.json")
            path.write_bytes(msgspec.json.encode(self.jobs))
            config = WorkerConfig(str(path), self.num_processes, _target())
            self._child = ChildProcess(_MODULE, config, "KernelCompiler", lambda child: None)
        except Exception as error:
            logger.warning("kernels are compiled one after the other: %s", error)
            self.close()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def wait(self, timeout_s: float = PATIENCE_S) -> bool:
        """Whether every kernel was compiled; what runs longer than ``timeout_s`` is ended."""
        child = self._child
        if child is None:
            return self._is_complete
        is_done = child.wait(timeout_s)
        is_complete = is_done and child.returncode == 0
        if is_complete:
            seconds = time.monotonic() - self._began
            logger.info(
                "%d kernels compiled by %d processes in %.2f s", len(self.jobs), self.num_processes, seconds
            )
        else:
            reason = f"exit code {child.returncode}" if is_done else f"not done in {timeout_s:g} s"
            logger.warning("some kernels were not compiled ahead (%s): the steps that need them do", reason)
        self._is_complete = is_complete
        self.close()
        return is_complete

    def close(self) -> None:
        """End the processes, if they still run."""
        if self._child is not None:
            stop_children([self._child], time.monotonic())
            self._child = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> KernelCompilation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_processes() -> int:
    """``ATOM_COMPILE_PROCESSES``, or half of the cores: the engine traces the model meanwhile.

    With a single core the engine compiles alone.
    """
    given = envs.ATOM_COMPILE_PROCESSES
    if given is not None:
        return given
    return min(MAX_PROCESSES, get_platform("cpu").default_num_threads // 2)


def _target() -> KernelTarget:
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return KernelTarget(target.backend, target.arch, target.warp_size)


_preparing: threading.Thread | None = None


def prepare_triton_ahead() -> None:
    """Do on a side thread what Triton needs before its first kernel and does outside of Python's lock.

    It hashes its own library, half a gigabyte, for the key of every kernel, and has its driver's part in C compiled.
    """
    global _preparing
    if _preparing is None:
        _preparing = threading.Thread(target=_prepare_triton, name="prepare-triton", daemon=True)
        _preparing.start()


def _prepare_triton() -> None:
    try:
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        triton_key()
        driver.active.get_current_target()
    except Exception as error:  # the first kernel says it again
        logger.debug("Triton is not prepared ahead: %s: %s", type(error).__name__, error)


def _join_preparing() -> None:
    if _preparing is not None:
        _preparing.join()
