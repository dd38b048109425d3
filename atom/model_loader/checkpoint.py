"""What a checkpoint holds, read from headers alone: no weights, no torch."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

# Bytes of one element, by torch's name of the dtype.
DTYPE_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. ``dtype`` is torch's name, or GGUF's name of a block type (``Q4_K``)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def num_bytes_as(self, dtype: str) -> int:
        """Bytes once loaded as ``dtype``; integer tensors keep their own type."""
        if self.dtype.startswith(("int", "uint", "bool")):
            return self.num_bytes
        return self.numel * DTYPE_SIZES[dtype]
