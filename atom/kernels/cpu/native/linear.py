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


class NativeLinear(LinearKernel):
    """Panels of 64 columns in the weight's own dtype; sums in fp32 whose order does not depend on the batch.

    bf16 rows are widened and rounded inside the product. A bias is packed when it is first seen.
    """

    makes_copy = True

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        return weights.pack(weight, _FORMAT[weight.dtype])

    def __call__(self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None:
            packed = packed.with_bias(bias)
        if x.dim() == 2:
            return weights.linear(x, packed)
        rows = weights.linear(x.reshape(-1, x.shape[-1]), packed)
        return rows.view(*x.shape[:-1], rows.shape[-1])


def supports_native(platform: Platform, *, dtype: Any = None, in_features: int = 0, **_: Any) -> bool:
    """Whether the panels take a layer: bf16 or fp32, a multiple of 32 input features, and a library to run."""
    fits = dtype in _FORMAT and 0 < in_features <= weights.MAX_K and in_features % weights.GROUP == 0
    return fits and native_library() is not None


register_kernel("linear", "native", priority={"cpu": 20}, supports=supports_native, is_traceable=False)(
    NativeLinear()
)
