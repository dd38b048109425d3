"""Rounded weights without native kernels: the same values, widened again, and PyTorch's product over them."""

from __future__ import annotations

import torch

from atom.kernels.reference.linear import ReferenceLinear
from atom.kernels.registry import register_kernel
from atom.quantization.quantizers import fake_quantize
from atom.quantization.spec import CPU_WEIGHTS, QuantSpec


class RoundedLinear(ReferenceLinear):
    """As good as the format is, and as slow and large as the weight was; activations stay as they are."""

    def __init__(self, spec: QuantSpec):
        self._spec = spec

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        rows = max(1, (64 << 20) // max(1, 4 * weight.shape[1]))
        for start in range(0, len(weight), rows):
            part = weight[start : start + rows]
            part.copy_(fake_quantize(part, self._spec.weight_bits, self._spec.group_size))
        return weight


for _spec in CPU_WEIGHTS.values():
    if _spec.weight_bits < 16:
        register_kernel(_spec.op, "rounded", priority={"cpu": 0})(RoundedLinear(_spec))
