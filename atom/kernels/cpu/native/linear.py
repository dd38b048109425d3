"""The native products as implementations of the operation ``linear``."""

from __future__ import annotations

from typing import Any

import torch

from atom.kernels.cpu.native import weights
from atom.kernels.cpu.native.library import native_library
from atom.kernels.cpu.native.weights import PackedWeight
from atom.kernels.linear import LinearKernel
from atom.kernels.registry import register_kernel
from atom.platforms import Platform

_FORMAT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_EPILOGUE = {"silu": "silu_mul", "gelu_tanh": "gelu_tanh_mul"}


class NativeLinear(LinearKernel):
    """Panels of 64 columns; sums in fp32 whose order does not depend on the batch.

    bf16 rows are widened and rounded inside the product. A bias is packed when it is first seen.

    Args:
        format: of :data:`weights.FORMATS`; None: the weight's own dtype.
    """

    makes_copy = True
    can_gather = True

    def __init__(self, format: str | None = None):
        self._format = format
        self.takes_gguf_blocks = format is None

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return weights.pack(weight, self._format or _FORMAT[weight.dtype], in_place=True)

    def pack_gated(self, weight: torch.Tensor, activation: str) -> PackedWeight:
        format = self._format or _FORMAT[weight.dtype]
        return weights.pack(weight, format, gate_up=True, epilogue=_EPILOGUE[activation])

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return weights.num_packed_bytes(self._format or _FORMAT[dtype], out_features, in_features)

    def __call__(self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None:
            packed = packed.with_bias(bias)
        if x.dim() == 2:
            return weights.linear(x, packed)
        rows = weights.linear(x.reshape(-1, x.shape[-1]), packed)
        return rows.view(*x.shape[:-1], rows.shape[-1])

    def gather(self, ids: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        return weights.gather_rows(ids, packed)


def supports_native(platform: Platform, *, dtype: Any = None, in_features: int = 0, **_: Any) -> bool:
    """Whether the panels take a layer: bf16 or fp32, a multiple of 32 input features, and a library to run."""
    fits = dtype in _FORMAT and 0 < in_features <= weights.MAX_K and in_features % weights.GROUP == 0
    return fits and native_library() is not None


register_kernel("linear", "native", priority={"cpu": 20}, supports=supports_native, is_traceable=False)(
    NativeLinear()
)
register_kernel("int8_linear", "native", priority={"cpu": 20}, supports=supports_native, is_traceable=False)(
    NativeLinear("int8_a8")
)
