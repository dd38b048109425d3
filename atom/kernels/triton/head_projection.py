"""When and how the kernel of ``head_projection_gluon`` makes a step's query, key and value heads."""

from __future__ import annotations

import itertools
from functools import cache

import torch
import triton

from atom.kernels.triton.hopper import MULTIPROCESSORS, can_bring, num_at_once, shared_layout
from atom.platforms import Platform

TOKENS, COLUMNS = 128, 256  # of a tile
BAND, STAGES = 16, 3
MIN_FILL = 0.85


def supports(
    platform: Platform, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Whether layers of such heads can go to the kernel: a tile's columns are heads of one kind."""
    return (
        platform.name == "cuda"
        and platform.architecture() == "sm_90"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim in (64, 128)
        and num_heads * head_dim % COLUMNS == 0
        and num_kv_heads * head_dim % COLUMNS == 0
    )


def fills(num_tokens: int, num_rows: int, at_once: int = MULTIPROCESSORS) -> bool:
    """Whether tiles of so many tokens and rows of the weight leave little of their rounds, ``at_once`` each, empty."""
    num_tiles = triton.cdiv(num_tokens, TOKENS) * (num_rows // COLUMNS)
    places = triton.cdiv(num_tiles, at_once) * at_once * TOKENS * COLUMNS
    return num_tokens * num_rows >= MIN_FILL * places > 0


@cache
def fewest_tokens(num_rows: int, at_once: int = MULTIPROCESSORS) -> int:
    """The smallest step whose product with so many rows of a weight the kernel takes."""
    return next(n for n in itertools.count(1) if fills(n, num_rows, at_once))


def takes(x: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the kernel can read these, and has the tiles for it; cuBLAS and a pass are faster otherwise."""
    is_full = fills(len(x), len(weight), num_at_once(x.device))
    return is_full and keys.dtype is x.dtype and can_bring(x, weight)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write heads of ``x weight^T`` into ``output``, normed and rotated, and keys and values into the cache.

    Args:
        x: ``[num_tokens, K]``.
        weight: ``[heads * head_dim, K]``: query, key and value heads.
        output: ``[num_tokens, heads, head_dim]``, contiguous.
        norm: ``[query and key heads, head_dim]`` fp32; None: no norm. The rest as ``rotate_and_write`` has it.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from atom.kernels.triton.head_projection_gluon import ROWS, STEP, projection_sm90

    layout = shared_layout()
    (num_tokens, columns), rows = x.shape, weight.shape[0]
    half = output.shape[2] // 2
    num_rows, num_columns = triton.cdiv(num_tokens, TOKENS), rows // COLUMNS
    num_tiles = num_rows * num_columns
    projection_sm90[(min(num_tiles, num_at_once(x.device)),)](
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [ROWS.value, STEP.value], layout),
        TensorDescriptor(weight, list(weight.shape), [columns, 1], [half, STEP.value], layout),
        TensorDescriptor(output, [num_tokens, rows], [rows, 1], [ROWS.value, COLUMNS], layout),
        cos,
        sin,
        norm,
        keys,
        values,
        slots,
        eps,
        num_tokens,
        num_tiles,
        num_rows,
        num_columns,
        columns,
        HAS_NORM=norm is not None,
        NUM_HEADS=num_heads,
        KV_HEADS=keys.shape[1],
        PAGE=keys.shape[2],
        HALF=half,
        BAND=BAND,
        STAGES=STAGES,
        CONSUMER_REGISTERS=232,
        PRODUCER_REGISTERS=40,
        num_warps=4,
    )
