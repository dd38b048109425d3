"""Products with rounded weights that are put together here: int8 in groups, and any format without native kernels."""

from __future__ import annotations

from typing import Any

import torch

from atom.kernels.cpu.native.gguf import BLOCK_TYPES, BlockPanels, PackedBlocks
from atom.kernels.cpu.native.library import native_library
from atom.kernels.cpu.native.linear import NativeLinear, supports_native
from atom.kernels.cpu.native.weights import PANEL
from atom.kernels.reference.linear import ReferenceLinear
from atom.kernels.registry import register_kernel
from atom.platforms import Platform
from atom.quantization.quantizers import fake_quantize, to_q8_0
from atom.quantization.spec import CPU_WEIGHTS, QuantSpec

_BLOCKS = BLOCK_TYPES["Q8_0"]
_ROWS_AT_ONCE = 256 * PANEL


class GroupedInt8Linear(NativeLinear):
    """int8 with a scale for every 32 of k, activations too: stored as GGUF's Q8_0, by whose product it goes.

    Twice as fast as int8 with wide activations, and without the loss of one activation scale a row.
    """

    def __init__(self) -> None:
        super().__init__("q8_0")

    def pack(self, weight: torch.Tensor) -> PackedBlocks:
        panels = BlockPanels(_BLOCKS, *weight.shape)
        for start in range(0, len(weight), _ROWS_AT_ONCE):
            panels.put(start, to_q8_0(weight[start : start + _ROWS_AT_ONCE]))
        return panels.packed()

    def pack_gated(self, weight: torch.Tensor, activation: str) -> PackedBlocks:
        panels = BlockPanels(_BLOCKS, *weight.shape, f"{activation}_mul")
        half = len(weight) // 2
        for base in (0, half):
            for start in range(0, half, _ROWS_AT_ONCE):
                panels.put(
                    base + start, to_q8_0(weight[base + start : base + min(start + _ROWS_AT_ONCE, half)])
                )
        return panels.packed()

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return _BLOCKS.packed_bytes(out_features, in_features)


class RoundedLinear(ReferenceLinear):
    """The same values widened again: as slow and large as the weight was; activations stay as they are."""

    def __init__(self, spec: QuantSpec):
        self._spec = spec

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        rows = max(1, (64 << 20) // max(1, 4 * weight.shape[1]))
        for start in range(0, len(weight), rows):
            part = weight[start : start + rows]
            part.copy_(fake_quantize(part, self._spec.weight_bits, self._spec.group_size))
        return weight


_NATIVE: dict[str, Any] = {"priority": {"cpu": 20}, "is_traceable": False}
for _spec in CPU_WEIGHTS.values():
    if _spec.weight_bits < 16:
        register_kernel(_spec.op, "reference")(RoundedLinear(_spec))
for _format in ("int8", "int8_a8", "int4"):
    register_kernel(f"linear_{_format}", "native", supports=supports_native, **_NATIVE)(NativeLinear(_format))


def _supports_blocks(platform: Platform, *, in_features: int = 0, **_: Any) -> bool:
    return in_features > 0 and in_features % _BLOCKS.block_elements == 0 and native_library() is not None


register_kernel("linear_int8_g32", "native", supports=_supports_blocks, **_NATIVE)(GroupedInt8Linear())
