"""The only code that asks what hardware this is.

``get_platform`` turns ``--device`` into a :class:`Platform`; everything else asks that object. Importing this
package does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atom.errors import ConfigError
from atom.platforms.cpu import CpuPlatform
from atom.platforms.cuda import CudaPlatform
from atom.platforms.interface import FEATURES, Platform
from atom.platforms.rocm import RocmPlatform

if TYPE_CHECKING:
    import torch

PLATFORMS: dict[str, type[Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform, "rocm": RocmPlatform}
DEVICES = ("auto", *PLATFORMS)
_ACCELERATOR_NODES = ("nvidiactl", "nvidia0", "kfd", "dxg")
_meta_platform: Platform | None = None

__all__ = [
    "DEVICES",
    "FEATURES",
    "PLATFORMS",
    "Platform",
    "get_platform",
    "has_accelerator_node",
    "meta_stands_for",
    "platform_of_device",
]


def get_platform(device: str = "auto") -> Platform:
    """The platform for ``device``: ``auto``, ``cpu``, ``cuda`` or ``rocm``.

    Raises:
        ConfigError: the name is unknown, or no such device can be used here.
    """
    if device not in DEVICES:
        raise ConfigError(f"device: {device!r} is not one of {', '.join(DEVICES)}")
    if device == "cpu":
        return CpuPlatform("--device cpu")
    if device != "auto":
        platform = PLATFORMS[device](f"--device {device}")
        if not platform.is_available():
            raise ConfigError(f"device: {device!r} was asked for, but {_why_not(platform)}")
        return platform
    missing = []
    for kind in (CudaPlatform, RocmPlatform):
        platform = kind(f"auto: torch sees a {kind.name.upper()} device")
        if platform.is_available():
            return platform
        missing.append(f"{kind.name}: {_why_not(platform)}")
    return CpuPlatform(f"auto: no accelerator ({'; '.join(missing)})")


def has_accelerator_node() -> bool:
    """Whether the system shows a device that torch may compute on (NVIDIA, AMD, either under WSL); no torch."""
    return any(Path("/dev", name).exists() for name in _ACCELERATOR_NODES)


def platform_of_device(device: torch.device) -> Platform:
    """The platform that a tensor's device belongs to; the meta device counts as the CPU, see ``meta_stands_for``."""
    if device.type == "cuda":
        import torch

        return (CudaPlatform if torch.version.hip is None else RocmPlatform)("the tensors' device")
    if device.type == "meta" and _meta_platform is not None:
        return _meta_platform
    return CpuPlatform("the tensors' device")


@contextmanager
def meta_stands_for(platform: Platform) -> Iterator[None]:
    """Inside, the meta device counts as ``platform``: what is built there chooses that platform's kernels."""
    global _meta_platform
    previous, _meta_platform = _meta_platform, platform
    try:
        yield
    finally:
        _meta_platform = previous


def _why_not(platform: Platform) -> str:
    import torch

    wants_hip = platform.name == "rocm"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"the installed torch {torch.__version__} is a CPU build"
    if wants_hip != (torch.version.hip is not None):
        return f"the installed torch {torch.__version__} is not built for {platform.name.upper()}"
    return "torch finds no usable device (driver, permissions or an empty list of visible devices)"
