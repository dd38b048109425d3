"""Linear layers of steps with 65 to 512 tokens on sm_90: for which layers and numbers the kernel of
``batch_gemm_gluon`` is the faster way, and its launch.

A choice depends on the shape of the weight and on the class of the number of tokens, on nothing else. What is not in
the table goes to cuBLAS. A gated product has its own ways in ``gated_linear``, which asks here first.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from atom.kernels.linear import LinearKernel
from atom.kernels.reference.linear import add_product
from atom.kernels.registry import register_kernel
from atom.kernels.triton.decode_parts import ACTIVATIONS, pdl_options
from atom.kernels.triton.hopper import MULTIPROCESSORS, can_bring, shared_layout
from atom.platforms import Platform
from atom.utils.custom_register import direct_register_custom_op

STEP = 64  # columns
SUMS = 128 * 256  # that a program leaves to another, at most
REACH = 32  # a choice serves the number of tokens that was measured and so many below: their products are padded to it


class BatchShape(NamedTuple):
    """How the kernel is built and launched.

    ``groups`` of four warps have ``rows`` of the weight each, for ``tokens`` at a time; ``stages`` steps of K are in
    shared memory; at most ``programs`` share the work, one on a multiprocessor.
    """

    rows: int
    groups: int
    tokens: int
    stages: int
    programs: int


# (rows of the weight, columns, is gated) -> by number of tokens. Only where the kernel was faster than cuBLAS, or than
# cuBLAS with a pass for the activation.
MEASURED: dict[tuple[int, int, bool], dict[int, BatchShape]] = {
    (28672, 4096, True): {
        128: BatchShape(64, 2, 128, 6, 112),
        256: BatchShape(64, 2, 128, 6, 128),
        512: BatchShape(128, 2, 128, 4, 128),
    },
    (4096, 14336, False): {256: BatchShape(64, 2, 128, 6, 128)},
    (4096, 4096, False): {256: BatchShape(64, 2, 128, 6, 128)},
    (16384, 2048, True): {128: BatchShape(64, 1, 128, 8, 128), 256: BatchShape(64, 2, 128, 6, 128)},
    (2048, 8192, False): {128: BatchShape(64, 2, 64, 8, 128), 256: BatchShape(64, 1, 128, 8, 128)},
}


def batch_shape(rows: int, columns: int, is_gated: bool, num_tokens: int) -> BatchShape | None:
    """How to run a product of ``num_tokens`` with a weight ``[rows, columns]``; None: by cuBLAS."""
    choices = MEASURED.get((rows, columns, is_gated), {})
    return next((shape for most, shape in choices.items() if most - REACH < num_tokens <= most), None)


def chunk_tokens(tokens: int, out_rows: int) -> int:
    """How many of a tile's tokens a group of warps writes at a time: 8 KB."""
    return min(tokens, 4096 // out_rows, 64)


@cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums that programs leave to others ``[programs, SUMS]``, and which are there: zeros between launches."""
    sums = torch.zeros(MULTIPROCESSORS * SUMS, dtype=torch.float32, device=device)
    return sums, torch.zeros(MULTIPROCESSORS * 2, dtype=torch.int32, device=device)


def launch(
    shape: BatchShape,
    x: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    activation: str | None = None,
    uses_pdl: bool = True,
) -> None:  # fmt: skip
    """Write ``x weight^T`` into ``output [num_tokens, N]``, or ``activation(x gate^T) * (x up^T)``.

    Launches of one device must follow each other: they share a workspace.

    Args:
        x: ``[num_tokens, K]`` bf16 with contiguous rows; K a multiple of 64.
        weight: ``[N, K]``, with an activation ``[gate | up, K]``, contiguous.
        activation: ``silu`` or ``gelu_tanh``; None: neither.
        uses_pdl: bring the first weights while the launch before this one ends.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from atom.kernels.triton.batch_gemm_gluon import batch_gemm

    (num_rows, columns), (num_tokens, size) = weight.shape, output.shape
    out_rows = shape.rows
    if activation is None:
        layout = shared_layout()
        weights = TensorDescriptor(weight, [num_rows, columns], [columns, 1], [shape.rows, STEP], layout)
    else:  # eight rows of gate, eight of up
        out_rows //= 2
        weights = TensorDescriptor(
            weight,
            [size // 8, 2, 8, columns],
            [8 * columns, size * columns, columns, 1],
            [shape.rows // 16, 2, 8, STEP],
            shared_layout(4),
        )
    chunk = chunk_tokens(shape.tokens, out_rows)
    num_tiles = triton.cdiv(num_rows, shape.rows * shape.groups)
    token_tiles = triton.cdiv(num_tokens, shape.tokens)
    steps = columns // STEP
    programs = min(shape.programs // token_tiles, num_tiles * steps) * token_tiles
    sums, flags = _workspace(x.device)
    batch_gemm[(programs,)](
        weights,
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [shape.tokens, STEP], shared_layout()),
        TensorDescriptor(
            output,
            list(output.shape),
            [size, 1],
            [chunk, out_rows],
            shared_layout(2, min(128, 2 * out_rows)),
        ),
        sums,
        flags,
        num_tiles,
        token_tiles,
        steps,
        ACTIVATION=0 if activation is None else ACTIVATIONS[activation],
        GROUPS=shape.groups,
        ROWS=shape.rows,
        TOKENS=shape.tokens,
        CHUNK=chunk,
        STAGES=shape.stages,
        PDL=uses_pdl,
        CONSUMER_REGISTERS=232,
        PRODUCER_REGISTERS=40,
        num_warps=4,
        **pdl_options(uses_pdl),
    )


def batch_product(
    x: torch.Tensor, weight: torch.Tensor, activation: str | None = None
) -> torch.Tensor | None:
    """``x weight^T``, or of ``weight [gate | up, K]`` the activated product; None where another way is faster."""
    is_gated = activation is not None
    shape = batch_shape(*weight.shape, is_gated, len(x))
    if shape is None or x.dtype is not torch.bfloat16 or not can_bring(x, weight):
        return None
    output = torch.empty((len(x), len(weight) // (1 + is_gated)), dtype=x.dtype, device=x.device)
    launch(shape, x, weight, output, activation)
    return output


def reserve(weight: torch.Tensor) -> None:
    """Make the workspace for products with ``weight``, if they may need one: before a graph is recorded."""
    is_known = any(key[:2] == tuple(weight.shape) for key in MEASURED)
    if is_known and weight.device.type == "cuda":
        _workspace(weight.device)


def rehearse(weight: torch.Tensor, max_tokens: int, activation: str | None = None) -> None:
    """Launch each kernel that steps of up to ``max_tokens`` take; called while launches are recorded."""
    is_gated = activation is not None
    x = weight[:8]
    output = weight.new_empty((len(x), len(weight) // (1 + is_gated)))
    for most, shape in MEASURED.get((*weight.shape, is_gated), {}).items():
        if most - REACH < max_tokens:
            launch(shape, x, weight, output, activation)


def batch_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [num_tokens, K]`` times ``weight [N, K]``: ``[num_tokens, N]``, by whichever way is faster."""
    product = batch_product(x, weight)
    return F.linear(x, weight) if product is None else product


def _shape_only(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


direct_register_custom_op("batch_linear", batch_linear, fake_impl=_shape_only)


def add_batch_product(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """``total [num_tokens, N] += x weight^T``, by whichever way is faster for the product."""
    product = batch_product(x, weight)
    if product is None:
        add_product(total, x, weight)
    else:
        total += product


direct_register_custom_op("add_batch_product", add_batch_product, mutates_args=["total"])


class BatchLinear(LinearKernel):
    """A product that chooses its way by the tokens of the step; the weight stays as it was loaded.

    Compiled code sees one opaque op.
    """

    makes_copy = False

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        reserve(weight)
        return weight

    def rehearse(self, packed: torch.Tensor, max_tokens: int) -> None:
        rehearse(packed, max_tokens)

    def __call__(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``[num_tokens, N]``; ``bias`` is None."""
        if torch.compiler.is_compiling():
            return torch.ops.aiter.batch_linear(x, packed)
        return batch_linear(x, packed)

    def add_to(
        self, total: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``total``, which holds the sum; ``bias`` is None."""
        if torch.compiler.is_compiling():
            torch.ops.aiter.add_batch_product(total, x, packed)
        else:
            add_batch_product(total, x, packed)
        return total


def _supports(
    platform: Platform,
    *,
    dtype: Any = None,
    in_features: int = 0,
    out_features: int = 0,
    has_bias: bool = False,
    gated_by: str | None = None,
    **_: Any,
) -> bool:
    return (
        gated_by is None
        and not has_bias
        and dtype is torch.bfloat16
        and (out_features, in_features, False) in MEASURED
        and platform.architecture() == "sm_90"
    )


register_kernel("linear", "batch", priority={"cuda": 10}, supports=_supports)(BatchLinear())
