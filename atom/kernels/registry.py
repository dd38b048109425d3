"""Which implementation of an operation runs: chosen once, when a layer is built, and said once in the log.

An operation has a name and any number of implementations. Each states the platforms that it runs on with a
priority for each, and optionally a predicate over the layer's facts (dtype, sizes). The plain PyTorch
reference accepts everything at priority 0, so an unsupported shape falls back to it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from atom.errors import ConfigError
from atom.platforms import PLATFORMS, Platform, platform_of_device

log = logging.getLogger(__name__)

Supports = Callable[..., bool]  # (platform, **traits) -> bool

REFERENCE_PRIORITY: Mapping[str, int] = dict.fromkeys(PLATFORMS, 0)
# Importing one of these registers its implementations.
_IMPLEMENTATION_MODULES = ("atom.kernels.reference", "atom.kernels.cpu")
# Only where Triton runs: importing it takes its time.
_TRITON_MODULES = (
    "atom.kernels.triton.elementwise",
    "atom.kernels.triton.fp8_linear",
    "atom.kernels.triton.fp8_rows",
    "atom.kernels.triton.gated_linear",
    "atom.kernels.triton.sampling",
)


@dataclass(frozen=True)
class Kernel:
    """One implementation of one operation; calling it calls ``function``."""

    op: str
    name: str
    function: Any
    priority: Mapping[str, int]  # platform name -> priority; absent: does not run there
    supports: Supports | None = None
    is_traceable: bool = True  # whether a compiler can see through it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


_kernels: dict[str, dict[str, Kernel]] = {}
_overrides: dict[str, str] = {}
_needs_tracing = False
_selected: dict[tuple[str, str], int] = {}  # (op, implementation) -> how many layers chose it


def register_kernel(
    op: str,
    name: str,
    *,
    priority: Mapping[str, int] = REFERENCE_PRIORITY,
    supports: Supports | None = None,
    is_traceable: bool = True,
) -> Callable[[Any], Any]:
    """Decorator: register a function (or an object with the operation's methods) as an implementation.

    ``supports(platform, **traits)`` gets what the layer passed to ``select_kernel``; it must accept traits
    that it does not know. ``is_traceable=False`` keeps an implementation out of models that are compiled: because
    a compiler cannot follow it, or because it does by hand what a compiler does better.
    """

    def add(function: Any) -> Any:
        if name in _kernels.setdefault(op, {}):
            raise ValueError(f"kernel {op!r} already has an implementation called {name!r}")
        _kernels[op][name] = Kernel(op, name, function, priority, supports, is_traceable)
        return function

    return add


def select_kernel(op: str, *, device: torch.device | None = None, **traits: Any) -> Any:
    """The function of the best implementation of ``op`` for the device's platform and the layer's traits.

    Args:
        device: where the layer's tensors will live; the current default device when None.
        traits: facts of the layer, e.g. ``dtype=torch.bfloat16, head_dim=128``.

    Raises:
        ConfigError: nothing registered fits, or an override names an implementation that cannot run.
    """
    platform = platform_of_device(device or torch.get_default_device())
    if platform.supports("triton"):
        for module in _TRITON_MODULES:
            importlib.import_module(module)
    kernel = _choose(op, platform, traits)
    key = (op, kernel.name)
    if key not in _selected:
        log.info("kernel %s: %s on %s", op, kernel.name, platform.name)
    _selected[key] = _selected.get(key, 0) + 1
    return kernel.function


def selected_kernels() -> dict[str, list[str]]:
    """What this process's layers chose so far: operation -> implementation names."""
    chosen: dict[str, list[str]] = {}
    for op, name in sorted(_selected):
        chosen.setdefault(op, []).append(name)
    return chosen


def implementations(op: str) -> list[str]:
    """Names of everything registered for ``op``, the reference included. Raises ConfigError if unknown."""
    return sorted(_implementations(op))


@contextmanager
def override_kernel(op: str, name: str) -> Iterator[None]:
    """Layers built inside use implementation ``name`` of ``op``, whatever the priorities say."""
    _implementation(op, name)
    previous = _overrides.get(op)
    _overrides[op] = name
    try:
        yield
    finally:
        if previous is None:
            del _overrides[op]
        else:
            _overrides[op] = previous


@contextmanager
def traceable_kernels(is_compiled: bool = True) -> Iterator[None]:
    """Layers built inside take only implementations that a compiler can follow, if they are to be compiled."""
    global _needs_tracing
    previous, _needs_tracing = _needs_tracing, is_compiled
    try:
        yield
    finally:
        _needs_tracing = previous


def _choose(op: str, platform: Platform, traits: Mapping[str, Any]) -> Kernel:
    if op in _overrides:
        kernel = _implementation(op, _overrides[op])
        if not _can_run(kernel, platform, traits):
            raise ConfigError(f"kernel {op}: {kernel.name!r} was asked for but does not support {traits}")
        return kernel
    able = [k for k in _implementations(op).values() if _can_run(k, platform, traits)]
    if not able:
        raise ConfigError(f"kernel {op}: no implementation runs on {platform.name} with {dict(traits)}")
    return max(able, key=lambda kernel: kernel.priority[platform.name])


def _can_run(kernel: Kernel, platform: Platform, traits: Mapping[str, Any]) -> bool:
    if platform.name not in kernel.priority or (_needs_tracing and not kernel.is_traceable):
        return False
    return kernel.supports is None or kernel.supports(platform, **traits)


def _implementations(op: str) -> dict[str, Kernel]:
    _import_implementations()
    if op not in _kernels:
        raise ConfigError(f"unknown kernel {op!r}; known: {', '.join(sorted(_kernels))}")
    return _kernels[op]


def _implementation(op: str, name: str) -> Kernel:
    known = _implementations(op)
    if name not in known:
        raise ConfigError(f"kernel {op}: no implementation {name!r}; there are {', '.join(sorted(known))}")
    return known[name]


@cache
def _import_implementations() -> None:
    for module in _IMPLEMENTATION_MODULES:
        importlib.import_module(module)
