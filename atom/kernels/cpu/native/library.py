"""The native kernels from Python: ``native_library()`` builds and loads them, ``call`` runs one on the team.

The library starts its threads on first use and must not be handed over a fork: a forked child that calls it gets
a team of its own. Calls release the GIL and take turns within a process.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from atom.errors import ConfigError
from atom.kernels.cpu.native.build import BuildError, Target, build_library
from atom.platforms import get_platform
from atom.platforms.cpu import cpu_facts
from atom.utils import envs

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_MAX_THREADS = 1024  # as in threads.c


class NativeLibrary:
    """The loaded library. Raises OSError when ``path`` is no library, or is for another processor."""

    def __init__(self, path: Path, num_threads: int = 1):
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._dll.atom_can_run.restype = ctypes.c_int
        if not self._dll.atom_can_run():
            raise OSError(f"{path} was compiled for another processor")
        for name in ("atom_run", "atom_run_alone"):
            function = getattr(self._dll, name)
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        self._dll.atom_set_threads.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        self._dll.atom_set_threads.restype = None
        self._dll.atom_num_threads.restype = ctypes.c_int
        self._run, self._run_alone = self._dll.atom_run, self._dll.atom_run_alone
        self._address = cache(self._find)  # not a dict: addresses are no fact that compiled code depends on
        self.set_threads(num_threads)

    def set_threads(self, num_threads: int, cpus: Sequence[int] | None = None) -> None:
        """Threads of the team, the caller's included; ``cpus`` pins those that the library starts.

        Raises ConfigError for a number out of range, or CPUs that are not as many.
        """
        if not 1 <= num_threads <= _MAX_THREADS:
            raise ConfigError(f"num_threads must be between 1 and {_MAX_THREADS}, got {num_threads}")
        if cpus is not None and len(cpus) != num_threads:
            raise ConfigError(f"cpus must name {num_threads} CPUs, one a thread, got {len(cpus)}")
        self._dll.atom_set_threads(num_threads, None if cpus is None else (ctypes.c_int * num_threads)(*cpus))

    @property
    def num_threads(self) -> int:
        return self._dll.atom_num_threads()

    def address(self, name: str) -> int:
        """Where the exported function ``name`` is. Raises AttributeError if there is none."""
        return self._address(name)

    def _find(self, name: str) -> int:
        return ctypes.cast(getattr(self._dll, name), ctypes.c_void_p).value or 0

    def function(self, name: str, argtypes: Sequence[type], restype: type | None = None) -> ctypes._CFuncPtr:
        """The exported function ``name`` as a callable of its own, for what is no kernel."""
        found = self._dll[name]  # a new object each time: prototypes of callers do not meet
        found.argtypes, found.restype = list(argtypes), restype
        return found

    def call(self, name: str, arguments: ctypes.Structure, alone: bool = False) -> None:
        """Run the kernel ``name(worker, arguments)`` on the team, or in this thread alone for small work."""
        (self._run_alone if alone else self._run)(self.address(name), ctypes.addressof(arguments))


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor's first element; None stays NULL. The caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()


@cache
def native_library() -> NativeLibrary | None:
    """The library for this machine with a thread a core, built if need be; None where there can be none.

    ``ATOM_CPU_NATIVE=0`` turns it off. Why there is none is logged once.
    """
    if not envs.ATOM_CPU_NATIVE:
        log.info("native CPU kernels: off (ATOM_CPU_NATIVE=0)")
        return None
    try:
        path = build_library(Target.of(cpu_facts()))
        return NativeLibrary(path, get_platform("cpu").default_num_threads)
    except (BuildError, ConfigError, OSError) as error:
        log.warning("native CPU kernels: none, PyTorch's are used: %s", error)
        return None
