"""Products of 65 to 512 tokens on sm_90 by the kernel of ``batch_gemm_gluon``: its launch, for decode steps
(``decode_linear``) and for gated products of prefill steps (``gated_linear``), and for which of the latter.

A choice depends on the shape of the weight and on the class of the number of tokens, on nothing else.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

from atom.kernels.triton.decode_parts import ACTIVATIONS, pdl_options
from atom.kernels.triton.hopper import MULTIPROCESSORS, can_bring, num_at_once, rows_there, shared_layout

STEP = 64  # columns
SUMS = 128 * 256  # that a program leaves to another, at most
REACH = 32  # a choice serves the number of tokens that was measured and so many below: their products are padded to it
SHARED = 226 << 10  # bytes for what is brought and what leaves; barriers and reductions need the rest


class BatchShape(NamedTuple):
    """How the kernel is built and launched.

    ``groups`` of four warps have ``rows`` of the weight each, for ``tokens`` at a time; up to ``stages`` steps of K are
    in shared memory; at most ``programs`` share the work, one on a multiprocessor.
    """

    rows: int
    groups: int
    tokens: int
    stages: int
    programs: int

    def num_programs(
        self, num_rows: int, columns: int, num_tokens: int, at_once: int = MULTIPROCESSORS
    ) -> int:
        """That share the product of a weight ``[num_rows, columns]``: a multiple of the tiles of tokens.

        No more than run ``at_once``: programs wait for what those of lower numbers leave to them. Those are started
        first, and leave it before they wait themselves, so that more would be slower, not stuck.
        """
        token_tiles = triton.cdiv(num_tokens, self.tokens)
        steps = triton.cdiv(num_rows, self.rows * self.groups) * (columns // STEP)
        return max(1, min(min(self.programs, at_once) // token_tiles, steps)) * token_tiles

    def buffers(self, has_residual: bool, has_next: bool) -> int:
        """From which results leave, of a group: two of chunks that take turns, or of whole tiles one each."""
        return 1 + has_next if has_residual or has_next else 2

    def chunk(self, is_gated: bool, has_residual: bool, has_next: bool) -> int:
        """Tokens of a buffer."""
        if has_residual or has_next:
            return self.tokens
        return chunk_tokens(self.tokens, self.rows // (1 + is_gated))

    def stages_there(self, is_gated: bool, has_residual: bool = False, has_next: bool = False) -> int:
        """Steps that shared memory has room for."""
        chunk = self.chunk(is_gated, has_residual, has_next)
        held = self.groups * self.buffers(has_residual, has_next) * chunk * self.rows // (1 + is_gated)
        step = (self.groups * self.rows + self.tokens) * STEP
        return min(self.stages, (SHARED // 2 - held) // step)


class Around(NamedTuple):
    """What stands before and behind a product in a decode step.

    ``squares [num_shares, stride]`` of x, which is times a norm's weight already; ``next_x`` is to be times
    ``next_norm``, and ``next_squares [tiles, stride]`` to be shares of the sums of squares of the result.
    """

    squares: torch.Tensor | None = None
    num_shares: int = 0
    eps: float = 0.0
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    next_norm: torch.Tensor | None = None
    next_x: torch.Tensor | None = None
    next_squares: torch.Tensor | None = None
    stride: int = 0


_NOTHING = Around()

# Gated products of prefill steps: (rows of the weight, columns) -> by number of tokens. Only where the kernel was
# faster than cuBLAS with a pass for the activation.
GATED_PRODUCTS: dict[tuple[int, int], dict[int, BatchShape]] = {
    (28672, 4096): {
        128: BatchShape(64, 2, 128, 6, 112),
        256: BatchShape(64, 2, 128, 6, 128),
        512: BatchShape(128, 2, 128, 4, 128),
    },
    (16384, 2048): {128: BatchShape(64, 1, 128, 8, 128), 256: BatchShape(64, 2, 128, 6, 128)},
}


def batch_shape(rows: int, columns: int, num_tokens: int) -> BatchShape | None:
    """How to run a gated product of ``num_tokens`` with a weight ``[rows, columns]``; None: by another kernel."""
    choices = GATED_PRODUCTS.get((rows, columns), {})
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
    activation: int = 0,
    *,
    around: Around = _NOTHING,
    room: tuple[torch.Tensor, torch.Tensor] | None = None,
    uses_pdl: bool = True,
) -> None:  # fmt: skip
    """Write ``x weight^T`` into ``output [num_tokens, N]``, or ``activation(x gate^T) * (x up^T)``.

    Launches with the same room must follow each other.

    Args:
        x: ``[num_tokens, K]`` bf16 with contiguous rows; K a multiple of 64.
        weight: ``[N, K]``, with an activation ``[gate | up, K]``, contiguous.
        activation: one of ``decode_parts.ACTIVATIONS``; 0: none.
        around: what else is done to x and to the result.
        room: for sums that programs leave to others, fp32, and for which are there, int32 zeros; None: the device's.
        uses_pdl: bring the first weights while the launch before this one ends.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from atom.kernels.triton.batch_gemm_gluon import batch_gemm

    (num_rows, columns), (num_tokens, size) = weight.shape, output.shape
    is_gated = activation > 0
    out_rows = shape.rows // (1 + is_gated)
    if is_gated:  # eight rows of gate, eight of up
        weights = TensorDescriptor(
            weight,
            [size // 8, 2, 8, columns],
            [8 * columns, size * columns, columns, 1],
            [shape.rows // 16, 2, 8, STEP],
            shared_layout(4),
        )
    else:
        weights = TensorDescriptor(
            weight, [num_rows, columns], [columns, 1], [shape.rows, STEP], shared_layout()
        )
    residual, next_norm = around.residual, around.next_norm
    what = (is_gated, residual is not None, next_norm is not None)
    chunk = shape.chunk(*what)
    token_tiles = triton.cdiv(num_tokens, shape.tokens)
    padded = token_tiles * shape.tokens

    def results(tensor: torch.Tensor | None, rows: int = num_tokens) -> TensorDescriptor | None:
        if tensor is None:
            return None
        layout = shared_layout(2, min(128, 2 * out_rows))
        return TensorDescriptor(tensor, [rows, size], [size, 1], [chunk, out_rows], layout)

    batch_gemm[(shape.num_programs(num_rows, columns, num_tokens, num_at_once(x.device)),)](
        weights,
        TensorDescriptor(
            x, [rows_there(x, padded), columns], [x.stride(0), 1], [shape.tokens, STEP], shared_layout()
        ),
        around.bias,
        None if residual is None else results(residual, rows_there(residual, padded)),
        results(output),
        around.squares,
        next_norm,
        results(around.next_x),
        around.next_squares,
        *(room or _workspace(x.device)),
        around.eps,
        around.num_shares,
        around.stride,
        triton.cdiv(num_rows, shape.rows * shape.groups),
        token_tiles,
        columns // STEP,
        ACTIVATION=activation,
        GROUPS=shape.groups,
        ROWS=shape.rows,
        TOKENS=shape.tokens,
        CHUNK=chunk,
        BUFFERS=shape.buffers(*what[1:]),
        STAGES=shape.stages_there(*what),
        HAS_NORM=around.squares is not None,
        HAS_BIAS=around.bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NEXT=next_norm is not None,
        PDL=uses_pdl,
        CONSUMER_REGISTERS=232,
        PRODUCER_REGISTERS=40,
        num_warps=4,
        **pdl_options(uses_pdl),
    )


def gated_product(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor | None:
    """``activation(x gate^T) * (x up^T)`` of ``weight [gate | up, K]``; None where another way is faster."""
    shape = batch_shape(*weight.shape, len(x))
    if shape is None or x.dtype is not torch.bfloat16 or not can_bring(x, weight):
        return None
    output = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    launch(shape, x, weight, output, ACTIVATIONS[activation])
    return output


def reserve(weight: torch.Tensor) -> None:
    """Make the workspace for gated products with ``weight``, if they may need one: before a graph is recorded."""
    if tuple(weight.shape) in GATED_PRODUCTS and weight.device.type == "cuda":
        _workspace(weight.device)


def rehearse(weight: torch.Tensor, max_tokens: int, activation: str) -> None:
    """Launch each kernel that steps of up to ``max_tokens`` take; called while launches are recorded."""
    x = weight[:8]
    output = weight.new_empty((len(x), len(weight) // 2))
    for most, shape in GATED_PRODUCTS.get(tuple(weight.shape), {}).items():
        if most - REACH < max_tokens:
            launch(shape, x, weight, output, ACTIVATIONS[activation])
