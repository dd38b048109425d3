"""Norms and gated activations of eager steps, one pass each, registered for CUDA and ROCm.

Where a model is compiled the compiler makes its own and fuses more, so these are not for tracing.
"""

import torch
import triton
import triton.language as tl

from atom.kernels.registry import register_kernel
from atom.kernels.triton.decode_parts import GELU_TANH, SILU, activate

PRIORITY = {"cuda": 10, "rocm": 10}
MAX_NORM_SIZE = 16384  # a program holds a row
GATE_COLUMNS = 1024  # of a program


def _fits_a_program(platform, *, size: int, **traits: object) -> bool:
    return size <= MAX_NORM_SIZE


@triton.jit
def _rms_norm(
    x,
    weight,
    output,
    eps,
    x_token,
    x_head,
    IS_PER_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row % HEADS
    channel = tl.arange(0, SIZE_PAD)
    mask = channel < SIZE
    value = tl.load(x + row // HEADS * x_token + head * x_head + channel, mask=mask, other=0.0)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if IS_PER_HEAD:
        weight += head * SIZE
    factor = tl.load(weight + channel, mask=mask, other=0.0)
    tl.store(output + row * SIZE + channel, (wide * inverse * factor).to(output.dtype.element_ty), mask=mask)


@register_kernel("rms_norm", "triton", priority=PRIORITY, supports=_fits_a_program, is_traceable=False)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension of ``x`` (2 or 3 dimensions), in its dtype.

    ``weight`` fp32: ``[size]``, or ``[heads, size]`` for ``x [num_tokens, heads, size]``.
    """
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.numel() // size
    if num_rows:
        _rms_norm[(num_rows,)](
            x,
            weight,
            output,
            eps,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            IS_PER_HEAD=weight.dim() == 2,
            HEADS=heads,
            SIZE=size,
            SIZE_PAD=triton.next_power_of_2(size),
            num_warps=1 if size <= 256 else 4 if size <= 4096 else 8,
        )
    return output


@triton.jit
def _gate(
    gate_up,
    output,
    row_token,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    gate = tl.load(gate_up + row * row_token + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_token + SIZE + column, mask=mask, other=0.0).to(tl.float32)
    gated = activate(gate, up, ACTIVATION)
    tl.store(output + row * SIZE + column, gated.to(output.dtype.element_ty), mask=mask)


def _launch_gate(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    size = rows.shape[1] // 2
    output = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if len(rows):
        _gate[(len(rows), triton.cdiv(size, GATE_COLUMNS))](
            rows, output, rows.stride(0), ACTIVATION=activation, SIZE=size, COLUMNS=GATE_COLUMNS, num_warps=4
        )
    return output


@register_kernel("silu_and_mul", "triton", priority=PRIORITY, is_traceable=False)
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up [..., 2 * size]``: ``[..., size]``."""
    return _launch_gate(gate_up, SILU)


@register_kernel("gelu_tanh_and_mul", "triton", priority=PRIORITY, is_traceable=False)
def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation of GELU, alike."""
    return _launch_gate(gate_up, GELU_TANH)
