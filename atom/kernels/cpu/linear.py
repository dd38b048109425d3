"""bf16 products through oneDNN with weights packed once, and the int8 product of the LM head."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from atom.kernels.linear import LinearKernel
from atom.kernels.reference.linear import Int8Linear
from atom.kernels.registry import register_kernel
from atom.platforms import Platform, get_platform

# From here on widening the weight to fp32 costs less than a slow bf16 product saves. Measured at 640 x 4096:
# 128 tokens 3.5 ms against 3.9, 512 tokens 10.5 against 15.5.
_WIDE_FROM_TOKENS = 128


class OneDnnLinear(LinearKernel):
    """oneDNN's product over a weight in oneDNN's own blocked layout.

    ``F.linear`` lets oneDNN read the row-major weight, which leaves a third of the bandwidth unused at one
    token (LM head of gemma-3-270m: 19.3 ms, packed 12.7 ms at the 26 GB/s that this machine reads).
    Where bf16 products are slower than fp32 ones, a wide batch goes through fp32: both accumulate in fp32,
    so only the order of the sums differs.
    """

    makes_copy = True

    def __init__(self) -> None:
        self.has_slow_bf16 = not get_platform("cpu").supports("fast_bf16_matmul")

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.has_slow_bf16 and x.shape[0] >= _WIDE_FROM_TOKENS:
            wide_bias = None if bias is None else bias.float()
            return F.linear(x.float(), packed.to_dense(torch.float32), wide_bias).to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def _has_packed_linear() -> bool:
    """Whether this torch build has the operators (they are private) and this CPU runs them in bf16."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.eye(16, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return torch.equal(torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], ""), weight)
    except (AttributeError, RuntimeError):
        return False


def _supports_packed(platform: Platform, *, dtype: Any = None, **_: Any) -> bool:
    return dtype is torch.bfloat16 and _has_packed_linear()


register_kernel(
    "linear", "onednn_packed", priority={"cpu": 10}, supports=_supports_packed, is_traceable=False
)(OneDnnLinear())


def _supports_int_mm(platform: Platform, *, in_features: int = 0, **_: Any) -> bool:
    return platform.supports("int8_matmul")


class IntMmLinear(Int8Linear):
    """See ``reference.linear.Int8Linear``; x is rounded to int8 with one scale a token.

    An int8 product is three times as fast here as one that widens the weight.
    """

    def product(self, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        x_scale = wide.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12) / 127.0
        product = torch._int_mm((wide / x_scale).round_().to(torch.int8), values.t())
        return product.float().mul_(scales).mul_(x_scale)


register_kernel("int8_linear", "int_mm", priority={"cpu": 10}, supports=_supports_int_mm)(IntMmLinear())
