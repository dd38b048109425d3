"""Products of float8_e4m3fn with a scale for each row of either side, and what makes such rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from atom.kernels.linear import Activations, LinearKernel, QuantisedRows
from atom.kernels.registry import register_kernel

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_LARGEST = 1e-12  # of a row's absolute values, so that a row of zeros has a scale


def round_rows(wide: torch.Tensor) -> QuantisedRows:
    """Rows ``wide [..., size]`` in fp32, each divided by its largest absolute value over 448 and rounded."""
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=MIN_LARGEST) / FP8_MAX
    return QuantisedRows((wide / scales).to(FP8), scales)


@register_kernel("quantise_fp8", "reference")
def quantise_fp8(x: torch.Tensor) -> QuantisedRows:
    """``x [num_tokens, size]`` rounded row by row."""
    return round_rows(x.float())


@register_kernel("rms_norm_fp8", "reference")
def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantisedRows:
    """The norm of ``x [num_tokens, size]`` (see ``rms_norm``) rounded row by row, once: from fp32."""
    wide = x.float()
    return round_rows(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight)


@register_kernel("silu_and_mul_fp8", "reference")
def silu_and_mul_fp8(gate_up: torch.Tensor) -> QuantisedRows:
    """``silu(gate) * up`` of ``gate_up [num_tokens, 2 * size]`` rounded row by row, from fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return round_rows(F.silu(gate) * up)


@register_kernel("gelu_tanh_and_mul_fp8", "reference")
def gelu_tanh_and_mul_fp8(gate_up: torch.Tensor) -> QuantisedRows:
    """``gelu(gate) * up`` with the tanh approximation of GELU, alike."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return round_rows(F.gelu(gate, approximate="tanh") * up)


class Fp8Weight(NamedTuple):
    """``values * scales`` of a weight: ``[out, in]`` float8_e4m3fn and ``[out, 1]`` fp32; products are of ``dtype``."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


class Fp8Linear(LinearKernel):
    """Weight and activations in fp8, one scale for each output feature and each token; sums in fp32."""

    makes_copy = True
    takes_quantised = True

    def pack(self, weight: torch.Tensor) -> Fp8Weight:
        values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
        rows = max(1, (1 << 25) // max(1, weight.shape[1]))  # bounds the copies in fp32
        for start in range(0, len(weight), rows):
            part = slice(start, start + rows)
            values[part], scales[part] = round_rows(weight[part].float())
        return Fp8Weight(values, scales, weight.dtype)

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * (in_features + 4)

    def __call__(self, x: Activations, packed: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x if isinstance(x, QuantisedRows) else self.quantise(x)
        return self.product(rows, packed, bias)

    def quantise(self, x: torch.Tensor) -> QuantisedRows:
        return quantise_fp8(x)

    def product(self, x: QuantisedRows, packed: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [num_tokens, in]`` times the weight: ``[num_tokens, out]`` of the weight's dtype."""
        product = F.linear(x.values.float(), packed.values.float()) * x.scales * packed.scales.t()
        return (product if bias is None else product + bias.float()).to(packed.dtype)


register_kernel("linear_fp8", "reference")(Fp8Linear())
