"""A gated MLP's first product with its activation, ``activation(x gate^T) * (x up^T)``, for many tokens on sm_90.

What ``batch_linear`` has measured, of 97 to 512 tokens, goes there. With few other tokens, and for layers that the
kernel of ``gated_gluon`` is not for, the product goes to cuBLAS and the activation is a pass of its own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from atom.kernels.linear import LinearKernel
from atom.kernels.registry import Supports, register_kernel
from atom.kernels.triton import batch_linear, elementwise
from atom.kernels.triton.hopper import MULTIPROCESSORS, can_bring, num_at_once, shared_layout
from atom.platforms import Platform
from atom.utils.custom_register import direct_register_custom_op

_DTYPES = (torch.float16, torch.bfloat16)
ACTIVATIONS = {"silu": elementwise.silu_and_mul, "gelu_tanh": elementwise.gelu_tanh_and_mul}


class GatedShape(NamedTuple):
    """How the kernel is built: groups of 64 tokens, steps of K in shared memory, token tiles that share columns."""

    groups: int
    stages: int
    band: int

    @property
    def tile(self) -> tuple[int, int]:
        """Tokens and columns of a tile."""
        from atom.kernels.triton.gated_gluon import COLUMNS, ROWS

        return ROWS.value * self.groups, COLUMNS.value

    def tiles(self, num_tokens: int, size: int) -> tuple[int, int]:
        """How many tiles there are along the tokens, and along the columns."""
        tokens, columns = self.tile
        return triton.cdiv(num_tokens, tokens), triton.cdiv(size, columns)

    def fill(self, num_tokens: int, size: int, at_once: int = MULTIPROCESSORS) -> float:
        """What share of the multiplications that programs have time for, whole rounds of tiles, is of the product."""
        num_rows, num_columns = self.tiles(num_tokens, size)
        num_places = triton.cdiv(num_rows * num_columns, at_once) * at_once
        return num_tokens * size / (num_places * math.prod(self.tile))


SHAPE = GatedShape(2, 4, 16)
TALL = GatedShape(3, 3, 11)  # reads a sixth less from L2 for a product of the same size
REGISTERS = {2: (232, 40), 3: (160, 24)}  # by groups: of a thread that multiplies, of one that brings

# On an H200, calls back to back, from 256 to 16,384 tokens of three models. Where tiles fill 0.73 of their rounds
# the kernel takes up to 19 % less time than cuBLAS and a pass, twice 2 % more; at 0.55 and below up to 50 % more.
MIN_FILL = 0.7
MIN_TOKENS = 256
# From here on the tall tiles take 1 to 6 % less time than the others, equally filled.
MIN_TALL_TOKENS = 8192
TALL_RATE = 1.01


def gated_shape(num_tokens: int, size: int, at_once: int = MULTIPROCESSORS) -> GatedShape | None:
    """How to build the kernel for this many tokens where ``at_once`` programs run at a time.

    None: cuBLAS and a pass for the activation are faster.
    """
    if num_tokens < MIN_TOKENS:
        return None
    fill = SHAPE.fill(num_tokens, size, at_once)
    tall_fill = TALL.fill(num_tokens, size, at_once)
    if num_tokens >= MIN_TALL_TOKENS and TALL_RATE * tall_fill >= max(fill, MIN_FILL):
        return TALL
    return SHAPE if fill >= MIN_FILL else None


def supports_layer(
    platform: Platform,
    *,
    dtype: Any = None,
    in_features: int = 0,
    out_features: int = 0,
    has_bias: bool = False,
    **_: Any,
) -> bool:
    """Whether a layer ``[gate | up, in_features]`` can go to the kernel: what its copies of tiles can address."""
    return (
        not has_bias
        and dtype in _DTYPES
        and in_features > 0
        and in_features % 8 == 0
        and out_features % 16 == 0
        and platform.architecture() == "sm_90"
    )


def launch(
    shape: GatedShape, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, activation: str
) -> None:
    """Write ``activation(x gate^T) * (x up^T)`` into ``output [num_tokens, size]``.

    Args:
        x: ``[num_tokens, in_features]``, rows of 16-byte multiples.
        weight: ``[gate | up, in_features]``, contiguous.
        activation: ``silu`` or ``gelu_tanh``.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from atom.kernels.triton.gated_gluon import COLUMNS, ROWS, STEP, gated_sm90

    layout = shared_layout()
    (num_tokens, in_features), size = x.shape, output.shape[1]
    num_rows, num_columns = shape.tiles(num_tokens, size)
    num_tiles = num_rows * num_columns
    gated_sm90[(min(num_tiles, num_at_once(x.device)),)](
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [ROWS.value, STEP.value], layout),
        TensorDescriptor(weight, list(weight.shape), [in_features, 1], [COLUMNS.value, STEP.value], layout),
        TensorDescriptor(output, list(output.shape), [size, 1], [ROWS.value, COLUMNS.value], layout),
        num_tiles,
        num_rows,
        num_columns,
        size,
        in_features,
        GROUPS=shape.groups,
        BAND=shape.band,
        STAGES=shape.stages,
        IS_SILU=activation == "silu",
        CONSUMER_REGISTERS=REGISTERS[shape.groups][0],
        PRODUCER_REGISTERS=REGISTERS[shape.groups][1],
        num_warps=4,
    )


def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(x gate^T) * (x up^T)``: ``[num_tokens, size]``; by the kernel where that is the faster way.

    Args:
        x: ``[num_tokens, in_features]``.
        weight: ``[gate | up, in_features]``, ``size`` rows each.
    """
    product = batch_linear.gated_product(x, weight, activation)
    if product is not None:
        return product
    size = weight.shape[0] // 2
    shape = gated_shape(len(x), size, num_at_once(x.device))
    if shape is None or not can_bring(x, weight):
        return ACTIVATIONS[activation](F.linear(x, weight))
    output = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
    launch(shape, x, weight, output, activation)
    return output


def _shape_only(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


direct_register_custom_op("gated_linear", gated_linear, fake_impl=_shape_only)


class GatedLinear(LinearKernel):
    """The product of a gated MLP with its activation; the weight stays as it was loaded.

    Compiled code sees one opaque op, which chooses by the tokens of the step that it is in.
    """

    makes_copy = False

    def __init__(self, activation: str):
        self.activation = activation

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def pack_gated(self, weight: torch.Tensor, activation: str) -> torch.Tensor | None:
        if activation != self.activation:
            return None
        batch_linear.reserve(weight)
        return weight

    def rehearse(self, packed: torch.Tensor, max_tokens: int) -> None:
        batch_linear.rehearse(packed, max_tokens, self.activation)
        x = packed[:8]
        output = packed.new_empty((len(x), len(packed) // 2))
        for shape, fewest in ((SHAPE, MIN_TOKENS), (TALL, MIN_TALL_TOKENS)):
            if max_tokens >= fewest:
                launch(shape, x, packed, output, self.activation)

    def __call__(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``[num_tokens, size]``; ``bias`` is None."""
        if torch.compiler.is_compiling():
            return torch.ops.aiter.gated_linear(x, packed, self.activation)
        return gated_linear(x, packed, self.activation)


def _supports(activation: str) -> Supports:
    def supports(platform: Platform, *, gated_by: str | None = None, **traits: Any) -> bool:
        return gated_by == activation and supports_layer(platform, **traits)

    return supports


for _activation in ACTIVATIONS:
    register_kernel("linear", f"gated_{_activation}", priority={"cuda": 10}, supports=_supports(_activation))(
        GatedLinear(_activation)
    )
