"""GGUF blocks as packed weights: the same bytes regrouped into the panels that the native products read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from atom.errors import ConfigError
from atom.kernels.cpu.native.library import native_library
from atom.kernels.cpu.native.weights import ALL_FORMATS, PANEL, AtomWeight, PackedWeight, gather_rows


@dataclass(frozen=True)
class BlockType:
    """A block format of GGUF that the products read as it is."""

    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, k: int) -> int:
        return k // self.block_elements * self.block_bytes

    def packed_bytes(self, n: int, k: int) -> int:
        return -(-n // PANEL) * PANEL * self.row_bytes(k)


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 32, 18),
        BlockType("Q5_0", 32, 22),
        BlockType("Q8_0", 32, 34),
        BlockType("Q4_K", 256, 144),
        BlockType("Q5_K", 256, 176),
        BlockType("Q6_K", 256, 210),
    )
}


@dataclass
class PackedBlocks(PackedWeight):
    """A weight in GGUF blocks. ``parts``: weights of several types, one behind the other in the output."""

    parts: tuple[PackedBlocks, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts) if self.parts else super().num_bytes

    def unpack(self) -> torch.Tensor:
        """See ``PackedWeight``. Raises ConfigError for a gated weight, whose rows are not gathered."""
        parts = self.parts or (self,)
        return torch.cat([gather_rows(torch.arange(part.n), part) for part in parts])


class BlockPanels:
    """Panels of a weight ``[n, k]`` of one type that arrive in runs of rows.

    Args:
        epilogue: with a gated one rows are ``[gate | up]``, whose panels alternate.

    Raises:
        ConfigError: the machine has no native kernels.
    """

    def __init__(self, kind: BlockType, n: int, k: int, epilogue: str = "store"):
        library = native_library()
        if library is None:
            raise ConfigError("the native CPU kernels are not available here (see the log)")
        if k % kind.block_elements:
            raise ConfigError(
                f"in_features must be a multiple of {kind.block_elements} for {kind.name}, got {k}"
            )
        self._kind, self._k, self._n, self._epilogue = kind, k, n, epilogue
        self._is_gated = epilogue in ("silu_mul", "gelu_tanh_mul")
        if self._is_gated and n % 2:
            raise ConfigError(f"out_features must be even with epilogue {epilogue!r}, got {n}")
        padded = 2 * (-(-n // 2 // PANEL)) * PANEL if self._is_gated else n
        self._data = torch.zeros(kind.packed_bytes(padded, k), dtype=torch.uint8)
        self._pack = library.function(
            "atom_gguf_pack",
            [ctypes.c_int32, ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, *[ctypes.c_int64] * 2],
            ctypes.c_int,
        )

    def put(self, first_row: int, blocks: torch.Tensor) -> None:
        """Rows ``first_row`` and following as their blocks ``[num_rows, row bytes]`` uint8.

        A gated weight takes runs that begin at a multiple of 64 rows of gate or up, and stay within one of them.
        """
        blocks = blocks.contiguous()
        num_rows, size = blocks.shape
        if size != self._kind.row_bytes(self._k) or first_row + num_rows > self._n:
            raise ConfigError(
                f"rows {first_row} to {first_row + num_rows} of {size} bytes do not fit {self._n} rows of "
                f"{self._kind.row_bytes(self._k)} bytes"
            )
        start, step = 0, 1
        if self._is_gated:
            is_up, row = divmod(first_row, self._n // 2)
            panel_bytes = PANEL * self._kind.row_bytes(self._k)
            start, step, first_row = (2 * (row // PANEL) + is_up) * panel_bytes, 2, row % PANEL
        status = self._pack(
            ALL_FORMATS[self._kind.name.lower()],
            blocks.data_ptr(),
            num_rows,
            self._k,
            self._data.data_ptr() + start,
            first_row,
            step,
        )
        if status != 0:
            raise ConfigError(f"a run of gated rows must begin at a multiple of {PANEL}, got {first_row}")

    def packed(self) -> PackedBlocks:
        return PackedBlocks(self._kind.name.lower(), self._epilogue, self._n, self._k, self._data)


def join_blocks(parts: Sequence[PackedBlocks]) -> PackedBlocks:
    """Weights over the same input as one whose output is theirs side by side."""
    if len(parts) == 1:
        return parts[0]
    n, k = sum(part.n for part in parts), parts[0].k
    formats = {part.format for part in parts}
    if len(formats) == 1 and all(part.n % PANEL == 0 for part in parts[:-1]):
        return PackedBlocks(formats.pop(), "store", n, k, torch.cat([part.data for part in parts]))
    array = (AtomWeight * (len(parts) + 1))(*(part.struct for part in parts), AtomWeight())
    data = torch.frombuffer(bytearray(array), dtype=torch.uint8)
    return PackedBlocks("parts", "store", n, k, data, parts=tuple(parts))
