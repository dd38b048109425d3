"""Kernels compiled side by side before a step needs them: what would be launched is recorded first.

Triton compiles a kernel when it is first launched, one after the other. The compiler and the assembler work outside
of Python's lock, so threads help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from atom.utils.logging import init_logger

logger = init_logger(__name__)

MAX_THREADS = 16


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
        facts = [_facts(a) for a in args]
        key = f"{kernel.fn.__name__} {facts} {sorted(options.items(), key=str)}"
        self.launches.setdefault(key, Launch(self.label, kernel, args, options))


@contextmanager
def recording() -> Iterator[Recorder]:
    """Inside, Triton launches nothing, in no thread, and a recorder keeps what it would have launched."""
    from triton.runtime.jit import JITFunction

    recorder, run = Recorder(), JITFunction.run
    JITFunction.run = lambda self, *args, **options: recorder.run(self, *args, **options)
    try:
        yield recorder
    finally:
        JITFunction.run = run


def compile_launches_of(function: Callable[[], None], device: torch.device | None = None) -> int:
    """Compile whatever kernels ``function`` launches, for ``device`` (None: the current one); returns how many.

    What the function computes is then undefined.
    """
    with recording() as recorder:
        function()
    launches = list(recorder.launches.values())

    def compile_one(launch: Launch) -> None:
        try:
            launch.compile()
        except Exception as error:  # the step that needs it says so again
            logger.debug("%s was not compiled ahead: %s", launch.kernel.fn.__name__, error)

    def begin() -> None:  # a thread begins with device 0
        if device is not None and device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(MAX_THREADS, "compile", begin) as pool:
        list(pool.map(compile_one, launches))
    return len(launches)
