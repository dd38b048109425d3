"""Activations rounded to fp8 row by row, in the pass that makes them: norms, gated activations, or neither.

A program holds a row: its largest value is known before the first is written, so that a row is read once.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.linear import QuantisedRows
from atom.kernels.reference.fp8 import FP8, FP8_MAX, MIN_LARGEST
from atom.kernels.registry import register_kernel
from atom.kernels.triton.decode_parts import GELU_TANH, NO_ACTIVATION, SILU, activate, pdl_options
from atom.kernels.triton.hopper import has_dependent_launch
from atom.platforms import Platform
from atom.utils.custom_register import direct_register_custom_op

PRIORITY = {"cuda": 10}  # ROCm's older chips have another fp8
MAX_SIZE = 65536  # of a row, which a program holds

_LARGEST = tl.constexpr(FP8_MAX)
_MIN_LARGEST = tl.constexpr(MIN_LARGEST)


@triton.jit
def _round_rows(
    x,
    weight,
    values,
    scales,
    eps,
    x_row,
    HAS_NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, SIZE_PAD)
    mask = channel < SIZE
    if HAS_NORM:
        factor = tl.load(weight + channel, mask=mask, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    wide = tl.load(x + row * x_row + channel, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps) * factor
    if ACTIVATION:
        up = tl.load(x + row * x_row + SIZE + channel, mask=mask, other=0.0).to(tl.float32)
        wide = activate(wide, up, ACTIVATION)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), _MIN_LARGEST) / _LARGEST
    tl.store(values + row * SIZE + channel, (wide / scale).to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale)


def _launch(
    x: torch.Tensor,
    size: int,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: int = NO_ACTIVATION,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``size`` results for each row of ``x [num_tokens, size or 2 * size]``, whose rows are contiguous."""
    values = torch.empty((len(x), size), dtype=FP8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    uses_pdl = has_dependent_launch(x.device)
    if len(x):
        _round_rows[(len(x),)](
            x,
            weight,
            values,
            scales,
            eps,
            x.stride(0),
            HAS_NORM=weight is not None,
            ACTIVATION=activation,
            SIZE=size,
            SIZE_PAD=triton.next_power_of_2(size),
            PDL=uses_pdl,
            num_warps=4 if size <= 2048 else 8 if size <= 8192 else 16,
            **pdl_options(uses_pdl),
        )
    return values, scales


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(x, x.shape[1])


def rms_norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(x, x.shape[1], weight, eps)


def gated_rows(gate_up: torch.Tensor, is_silu: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(gate_up, gate_up.shape[1] // 2, activation=SILU if is_silu else GELU_TANH)


def _shape_only(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((x.shape[0], size), dtype=FP8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


direct_register_custom_op("quantise_rows_fp8", quantise_rows, fake_impl=lambda x: _shape_only(x, x.shape[1]))
direct_register_custom_op(
    "rms_norm_rows_fp8", rms_norm_rows, fake_impl=lambda x, weight, eps: _shape_only(x, x.shape[1])
)
direct_register_custom_op(
    "gated_rows_fp8",
    gated_rows,
    fake_impl=lambda gate_up, is_silu: _shape_only(gate_up, gate_up.shape[1] // 2),
)


def _fits_a_program(platform: Platform, *, size: int = 0, **_: object) -> bool:
    return size <= MAX_SIZE and platform.supports("fp8_e4m3fn")


@register_kernel("quantise_fp8", "triton", priority=PRIORITY, supports=_fits_a_program)
def quantise_fp8(x: torch.Tensor) -> QuantisedRows:
    """``x [num_tokens, size]`` rounded row by row."""
    return QuantisedRows(*torch.ops.aiter.quantise_rows_fp8(x))


@register_kernel("rms_norm_fp8", "triton", priority=PRIORITY, supports=_fits_a_program)
def rms_norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantisedRows:
    """The norm of ``x [num_tokens, size]`` with ``weight [size]`` in fp32, rounded row by row."""
    return QuantisedRows(*torch.ops.aiter.rms_norm_rows_fp8(x, weight, eps))


@register_kernel("silu_and_mul_fp8", "triton", priority=PRIORITY, supports=_fits_a_program)
def silu_and_mul_fp8(gate_up: torch.Tensor) -> QuantisedRows:
    """``silu(gate) * up`` of ``gate_up [num_tokens, 2 * size]``, rounded row by row."""
    return QuantisedRows(*torch.ops.aiter.gated_rows_fp8(gate_up, True))


@register_kernel("gelu_tanh_and_mul_fp8", "triton", priority=PRIORITY, supports=_fits_a_program)
def gelu_tanh_and_mul_fp8(gate_up: torch.Tensor) -> QuantisedRows:
    """``gelu(gate) * up`` with the tanh approximation of GELU, alike."""
    return QuantisedRows(*torch.ops.aiter.gated_rows_fp8(gate_up, False))
