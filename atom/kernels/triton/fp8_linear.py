"""Products of fp8 weights and fp8 activations with a scale for each row of both; sums in fp32.

Steps of up to ``MAX_TOKENS`` tokens read weights and little else: one kernel of our own, which adds bias and residual
to what it made and asks for its first weights while the launch before it ends. With more the product is the library's.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.linear import Activations, QuantisedRows
from atom.kernels.reference.fp8 import Fp8Linear, Fp8Weight
from atom.kernels.registry import register_kernel
from atom.kernels.triton.decode_parts import pdl_options, send_to_l2
from atom.kernels.triton.fp8_rows import MAX_SIZE, quantise_fp8
from atom.kernels.triton.hopper import has_dependent_launch
from atom.platforms import Platform, platform_of_device
from atom.utils.custom_register import direct_register_custom_op


class Fp8Tile(NamedTuple):
    """Tokens and step of K of a program."""

    tokens: int
    step: int
    num_warps: int


# Rows of tokens that are not there cost no reads, so that one tile serves up to 64: tiles of 16 rows, whose products
# are by other instructions, took longer at one token (H200).
TILES = (Fp8Tile(64, 256, 4), Fp8Tile(128, 128, 8))
STAGES, FEW_STAGES = 6, 2  # the first take 192 KiB of shared memory
LARGE_SHARED_MEMORY = ("sm_90", "sm_100", "sm_103")
MAX_TOKENS = 128  # with more the library's product takes less time
SENT_BYTES = 1024  # of each column's weights, sent to L2 while the launch before ends


def tile_for(num_tokens: int) -> Fp8Tile:
    """The smallest tile that holds up to ``MAX_TOKENS`` tokens."""
    return next(tile for tile in TILES if num_tokens <= tile.tokens)


@cache
def num_stages(device: torch.device) -> int:
    """How many steps of K a program of ``device`` has room for."""
    is_large = device.type == "cuda" and platform_of_device(device).architecture() in LARGE_SHARED_MEMORY
    return STAGES if is_large else FEW_STAGES


def tile_columns(out_features: int) -> int:
    """How many output features a program computes: fewer where there would be fewer programs than multiprocessors.

    Each sum runs over K in the same order whatever they are.
    """
    return 64 if out_features > 4096 else 32


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_product(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    output,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SENT: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    k = tl.arange(0, STEP)
    # Weights of columns beyond the last are the last one's.
    has_token = (token < num_tokens)[:, None]
    x_tile = x + token.to(tl.int64)[:, None] * K + k[None, :]
    weight_tile = weight + tl.minimum(column, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    if PDL:
        line = tl.minimum(tl.arange(0, SENT // 128) * 128, K - 1)
        lines = weight + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + line[None, :]
        send_to_l2(lines)
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for start in range(0, K, STEP):
        if K % STEP == 0:
            left = tl.load(x_tile + start, mask=has_token, other=0.0)
            right = tl.load(weight_tile + start)
        else:
            left = tl.load(x_tile + start, mask=has_token & (k < K - start)[None, :], other=0.0)
            right = tl.load(weight_tile + start, mask=(k < K - start)[:, None], other=0.0)
        sums = tl.dot(left, right, sums)
    is_inside = has_token & (column < N)[None, :]
    sums *= tl.load(x_scales + token, mask=token < num_tokens, other=0.0)[:, None]
    sums *= tl.load(weight_scales + column, mask=column < N, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    place = token.to(tl.int64)[:, None] * N + column[None, :]
    if ADDS:
        sums += tl.load(output + place, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(output + place, sums.to(output.dtype.element_ty), mask=is_inside)


def launch(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    adds: bool,
) -> None:
    """Write a product into ``output [num_tokens, N]``, or add it to that; ``num_tokens`` is 1 to ``MAX_TOKENS``."""
    (num_tokens, in_features), out_features = x.shape, len(weight)
    tile, columns = tile_for(num_tokens), tile_columns(out_features)
    uses_pdl = has_dependent_launch(x.device)
    _fp8_product[(triton.cdiv(out_features, columns),)](
        x,
        x_scales,
        weight,
        weight_scales,
        bias,
        output,
        num_tokens,
        N=out_features,
        K=in_features,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        TOKENS=tile.tokens,
        COLUMNS=columns,
        STEP=tile.step,
        SENT=SENT_BYTES,
        PDL=uses_pdl,
        num_warps=tile.num_warps,
        num_stages=num_stages(x.device),
        **pdl_options(uses_pdl),
    )


def fp8_product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``(x * x_scales) (weight * weight_scales)^T + bias``: ``[num_tokens, out]`` in bfloat16.

    Args:
        x: ``[num_tokens, in]`` fp8, contiguous, with ``x_scales [num_tokens, 1]`` fp32.
        weight: ``[out, in]`` fp8, contiguous, with ``weight_scales [out, 1]`` fp32.
        bias: ``[out]``, bfloat16.
    """
    if len(x) > MAX_TOKENS:
        return torch._scaled_mm(
            x,
            weight.t(),
            scale_a=x_scales,
            scale_b=weight_scales.t(),
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    output = torch.empty((len(x), len(weight)), dtype=torch.bfloat16, device=x.device)
    if len(x):
        launch(x, x_scales, weight, weight_scales, bias, output, adds=False)
    return output


def add_fp8_product(
    total: torch.Tensor,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Add that product to ``total [num_tokens, out]``, bfloat16."""
    if len(x) > MAX_TOKENS:
        total.add_(fp8_product(x, x_scales, weight, weight_scales, bias))
    elif len(x):
        launch(x, x_scales, weight, weight_scales, bias, total, adds=True)


direct_register_custom_op(
    "fp8_product",
    fp8_product,
    fake_impl=lambda x, x_scales, weight, weight_scales, bias: x.new_empty(
        (x.shape[0], weight.shape[0]), dtype=torch.bfloat16
    ),
)
direct_register_custom_op("add_fp8_product", add_fp8_product, mutates_args=["total"])


class TritonFp8Linear(Fp8Linear):
    """The same by tensor cores. Compiled code sees opaque ops, which choose by the tokens of their step."""

    def quantise(self, x: torch.Tensor) -> QuantisedRows:
        return quantise_fp8(x)

    def product(self, x: QuantisedRows, packed: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.aiter.fp8_product(*x, packed.values, packed.scales, bias)

    def add_to(
        self, total: torch.Tensor, x: Activations, packed: Fp8Weight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x if isinstance(x, QuantisedRows) else self.quantise(x)
        torch.ops.aiter.add_fp8_product(total, *rows, packed.values, packed.scales, bias)
        return total

    def rehearse(self, packed: Fp8Weight, max_tokens: int) -> None:
        scales = torch.empty((MAX_TOKENS, 1), dtype=torch.float32, device=packed.values.device)
        x = packed.values.new_empty((MAX_TOKENS, packed.values.shape[1]))
        output = torch.empty((MAX_TOKENS, len(packed.values)), dtype=packed.dtype, device=x.device)
        for tile in TILES:
            rows = slice(tile.tokens)
            for adds in (False, True):
                launch(x[rows], scales[rows], *packed[:2], None, output[rows], adds)


def _supports(
    platform: Platform, *, dtype: Any = None, in_features: int = 0, out_features: int = 0, **_: Any
) -> bool:
    return (
        dtype is torch.bfloat16
        and 0 < in_features <= MAX_SIZE
        and in_features % 16 == 0
        and out_features % 16 == 0
        and platform.supports("fp8_e4m3fn")
    )


register_kernel("linear_fp8", "triton", priority={"cuda": 10}, supports=_supports)(TritonFp8Linear())
