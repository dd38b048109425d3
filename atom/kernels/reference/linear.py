"""Products with a weight: as it is, and int8 with one scale a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom.kernels.linear import LinearKernel
from atom.kernels.registry import register_kernel
from atom.utils.custom_register import direct_register_custom_op

_ROWS_AT_ONCE = 16384  # bounds the fp32 copy of an int8 weight


def add_product(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """``total [num_tokens, out] += x [num_tokens, in] weight^T`` with ``weight [out, in]``; rounded once."""
    total.addmm_(x, weight.t())


# Opaque, for compiled code: what Inductor makes of the same in its own terms copies ``total`` first.
direct_register_custom_op("add_product", add_product, mutates_args=["total"])


class ReferenceLinear(LinearKernel):
    """``F.linear`` on the weight as it was loaded."""

    makes_copy = False

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def __call__(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, packed, bias)

    def add_to(
        self, total: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``total``, to which the product adds its results where it makes them."""
        if bias is not None:
            return super().add_to(total, x, packed, bias)
        if torch.compiler.is_compiling():
            torch.ops.aiter.add_product(total, x, packed)
        else:
            add_product(total, x, packed)
        return total


register_kernel("linear", "reference")(ReferenceLinear())


def quantize_rows_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 with one scale a row: ``(values [rows, size] int8, scales [rows] fp32)``."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = weight[start : start + _ROWS_AT_ONCE].float()
        scale = rows.abs().amax(dim=-1).clamp_(min=1e-12) / 127.0
        scales[start : start + _ROWS_AT_ONCE] = scale
        values[start : start + _ROWS_AT_ONCE] = (rows / scale[:, None]).round_().to(torch.int8)
    return values, scales


class Int8Linear(LinearKernel):
    """A weight rounded to int8 with one scale a row; results are fp32."""

    makes_copy = True

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows_int8(weight)

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * (in_features + 4)

    def __call__(
        self, x: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        product = self.product(x, *packed)
        return product if bias is None else product.add_(bias)

    def product(self, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """``x [num_tokens, in]`` times the dequantised ``values [out, in] * scales[:, None]``, in fp32."""
        wide = x.float()
        parts = [
            F.linear(wide, values[start : start + _ROWS_AT_ONCE].float())
            for start in range(0, values.shape[0], _ROWS_AT_ONCE)
        ]
        return torch.cat(parts, dim=-1) * scales


register_kernel("int8_linear", "reference")(Int8Linear())
