"""What the rest of ATOM may ask about the hardware. No torch at import: methods import it when called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Features that code above this room may ask for with ``Platform.supports``.
FEATURES = (
    "bf16",  # bf16 tensors compute correctly and without emulation in Python
    "fast_bf16_matmul",  # a wide bf16 product is faster than the same product in fp32
    "int8_matmul",  # int8 x int8 -> int32 products
    "device_graphs",  # CUDA / HIP graphs
    "triton",  # Triton kernels compile and run natively
    "pinned_memory",  # page-locked host buffers make copies to the device asynchronous
    "fp8_e4m3fn",
    "fp8_e4m3fnuz",
)


class Platform(ABC):
    """One kind of hardware. Instances are cheap and hold no device state.

    ``reason`` says why this platform was chosen; it is set by ``get_platform``.
    """

    name: str  # cpu | cuda | rocm: the key of kernel and backend registries
    device_type: str  # as torch spells it: cpu | cuda (ROCm builds of torch say cuda too)
    communication_backend: str  # of torch.distributed
    attention_backends: tuple[
        str, ...
    ]  # by preference; the first that supports and prefers a layer serves it
    compilation_level: int = 0  # unless the user says
    cudagraph_mode: str = "NONE"  # alike; a name of CUDAGraphMode

    def __init__(self, reason: str = ""):
        self.reason = reason

    @abstractmethod
    def is_available(self) -> bool:
        """Whether at least one device of this kind can be used by the installed torch."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Facts for the log and ``atom doctor``: device name, cores, memory, instruction sets, versions."""

    @abstractmethod
    def supports(self, feature: str) -> bool:
        """Whether ``feature`` (one of ``FEATURES``) works here. Raises ValueError for an unknown name."""

    @abstractmethod
    def total_memory(self, index: int = 0) -> int:
        """Bytes of memory that device ``index`` has for weights and cache."""

    @abstractmethod
    def free_memory(self, index: int = 0) -> int:
        """Bytes of it that are free now."""

    def num_multiprocessors(self, index: int = 0) -> int:
        """Of device ``index``: programs that fill one each run so many at a time."""
        return 1

    @property
    def num_devices(self) -> int:
        return 1

    @property
    def default_num_threads(self) -> int:
        """Compute threads of the host process that drives one device."""
        return 1

    def default_dtype(self) -> torch.dtype:
        """What ``--dtype auto`` means for a checkpoint that does not name its dtype."""
        import torch

        return torch.bfloat16

    def device(self, index: int = 0) -> torch.device:
        import torch

        return torch.device(self.device_type, index)

    def synchronize(self) -> None:
        """Wait for everything launched on the current device."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r})"


def check_feature(feature: str) -> None:
    """Raise ValueError for a name that is not in ``FEATURES``: a typo must not read as "unsupported"."""
    if feature not in FEATURES:
        raise ValueError(f"unknown platform feature {feature!r}; known: {', '.join(FEATURES)}")
