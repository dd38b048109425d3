"""GGUF block formats to float32, a run of rows at a time.

The formats of common files have a native path that writes the parameter itself, and a vectorised one in torch,
several times as fast as numpy; every other one goes through ``gguf.quants``. All give the same bits (tested for
each type).

Block layouts: ggml's quantisation formats. Functions take blocks uint8 [num_blocks, block bytes] and
return float32 [num_blocks, block elements].
"""

from collections.abc import Callable
from math import prod

import torch

from atom.errors import ModelLoadError
from atom.kernels.cpu.native.dequantize import dequantize
from atom.model_loader.checkpoint import TensorInfo
from atom.model_loader.lazy_tensor import RowSource
from atom.model_loader.weight_file import WeightFile

BlockFn = Callable[[torch.Tensor], torch.Tensor]


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """The fp16 at byte ``offset`` of each block as float32 [num_blocks, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Groups of bytes [..., n] to their low nibbles, then their high ones: [..., 2 * n]."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [num_blocks, n] to their bits, lowest first: [num_blocks, 8 * n]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]).view(torch.int8) - 8).float().mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return (quants.view(torch.int8) - 16).float().mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return quants.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and eight 6-bit minima out of 12 bytes: two [num_blocks, 8]."""
    scale, minimum, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((scale & 63, (mixed & 15) | ((scale >> 6) << 4)), dim=1)
    minima = torch.cat((minimum & 63, (mixed >> 4) | ((minimum >> 6) << 4)), dim=1)
    return scales, minima


def _k_affine(blocks: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """``d * scale * q - dmin * min`` over groups of 32; quants uint8 [num_blocks, 8, 32]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales.float()).unsqueeze(-1)
    minimum = (_half(blocks, 2) * minima.float()).unsqueeze(-1)
    return quants.float().mul_(scale).sub_(minimum).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_affine(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    groups = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> groups) & 1
    return _k_affine(blocks, low | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3
    quants = (low | (high << 4)).view(torch.int8) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return quants.view(-1, 16, 16).float().mul_(scale.unsqueeze(-1)).flatten(1)


FAST_TYPES: dict[str, BlockFn] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _general(type_name: str) -> BlockFn:
    """The path of the gguf package for one type."""
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    kind = GGMLQuantizationType[type_name]

    def dequantise(blocks: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(quants.dequantize(blocks.numpy(), kind))

    return dequantise


class QuantisedRows(RowSource):
    """Rows of a GGUF tensor in a block format, as float32. The type has passed :func:`check_type`."""

    dtype = torch.float32

    def __init__(self, file: WeightFile, info: TensorInfo):
        self._file = file
        self._offset = info.offset
        self.shape = info.shape
        self._type = info.dtype
        # Blocks run along the last dimension: a vector is stored as one row, whatever part is asked for.
        self._row_bytes = info.num_bytes // max(1, prod(info.shape[:-1]))
        self._rows_per_step = prod(info.shape[1:-1])
        self._block_bytes = _sizes(info.dtype)[1]
        self.is_fast = info.dtype in FAST_TYPES
        self._dequantise = FAST_TYPES.get(info.dtype) or _general(info.dtype)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        if len(self.shape) == 1:
            return self._read(0, 1).view(-1)[start:stop]
        first, last = start * self._rows_per_step, stop * self._rows_per_step
        return self._read(first, last).view(stop - start, *self.shape[1:])

    def copy_rows(self, start: int, stop: int, target: torch.Tensor) -> None:
        if len(self.shape) > 1:
            blocks = self._blocks(start * self._rows_per_step, stop * self._rows_per_step)
            if dequantize(blocks, self._type, target):
                return
        super().copy_rows(start, stop, target)

    def _read(self, first: int, last: int) -> torch.Tensor:
        return self._dequantise(self._blocks(first, last))

    def _blocks(self, first: int, last: int) -> torch.Tensor:
        raw = self._file.bytes_at(self._offset + first * self._row_bytes, (last - first) * self._row_bytes)
        return raw.view(-1, self._block_bytes)

    def read_blocks(self, start: int, stop: int) -> torch.Tensor:
        """Rows of a matrix as they are stored: uint8 [stop - start, row bytes]; may share mapped memory."""
        raw = self._file.bytes_at(self._offset + start * self._row_bytes, (stop - start) * self._row_bytes)
        return raw.view(stop - start, self._row_bytes)

    def widen(self, blocks: torch.Tensor) -> torch.Tensor:
        """What :meth:`read_blocks` gave, as float32 [num_rows, row elements]."""
        return self._dequantise(blocks.reshape(-1, self._block_bytes)).view(len(blocks), -1)

    def release(self, start: int, stop: int) -> None:
        if len(self.shape) > 1:
            step = self._rows_per_step * self._row_bytes
            self._file.release(self._offset + start * step, (stop - start) * step)


def _sizes(type_name: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]


def block_elements(type_name: str) -> int:
    """Elements of a block."""
    return _sizes(type_name)[0]


def check_type(info: TensorInfo) -> None:
    """Refuse a block format that cannot be dequantised, before any weight is read.

    Raises:
        ModelLoadError: names tensor, file and type.
    """
    if info.dtype in FAST_TYPES:
        return
    try:
        _general(info.dtype)(torch.zeros(1, _sizes(info.dtype)[1], dtype=torch.uint8))
    except NotImplementedError as error:
        raise ModelLoadError(
            f"tensor {info.name} in {info.file.name} has type {info.dtype}, which is not supported"
        ) from error
