"""When and how the sm_90 kernel of ``varlen_gluon`` takes a step's attention."""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom.kernels.triton.hopper import num_at_once, shared_layout
from atom.kernels.triton.varlen_gluon import varlen_sm90
from atom.platforms import platform_of_device

ROWS = 128  # of a tile: the kernel is written for it
MAX_GROUP = 16  # query heads of a kv head: a half tile has at least 4 tokens
MIN_TOKENS = 256  # of a step: below, tiles of 64 rows keep more of the device busy
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40  # a thread; 2 x 232 + 40 of the 504 that three groups share


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel is for this device."""
    platform = platform_of_device(device)
    return platform.name == "cuda" and platform.architecture() == "sm_90"


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel can read these, shaped as ``varlen_attention`` takes them."""
    num_heads, dim = q.shape[1:]
    group, page = num_heads // k.shape[1], keys.shape[2]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and all(t.dtype is q.dtype for t in (k, v, keys, values))
        and dim in (64, 128)
        and group & (group - 1) == 0
        and group <= MAX_GROUP
        and page & (page - 1) == 0
        and 8 <= page <= 128
        and all(t.data_ptr() % 16 == 0 for t in (q, k, v, keys, values))
        and all(t.stride(2) == 1 and t.stride(1) == dim and t.stride(0) % 8 == 0 for t in (q, k, v))
    )


def launch(
    num_keys: int,
    num_stages: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor | None,
    tiles: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the attention of ``q`` into ``output``; all as ``varlen_attention`` has it.

    Args:
        num_keys: of a key tile.
        num_stages: key tiles and value tiles in shared memory.
        tiles: of ``plan_tiles`` for ``ROWS`` rows.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, page = keys.shape[1:3]
    group = num_heads // num_kv_heads
    tokens = ROWS // group // 2  # that a copy brings
    flat, deep = shared_layout(2), shared_layout(3)
    step_shape = [num_tokens, num_kv_heads * dim]
    cache_shape = [keys.shape[0] * num_kv_heads * page, dim]
    num_works = len(tiles) * num_kv_heads
    varlen_sm90[(min(num_works, num_at_once(q.device)),)](
        TensorDescriptor(q, [num_tokens, num_heads, dim], [q.stride(0), dim, 1], [tokens, group, dim], deep),
        TensorDescriptor(k, step_shape, [k.stride(0), 1], [num_keys, dim], flat),
        TensorDescriptor(v, step_shape, [v.stride(0), 1], [num_keys, dim], flat),
        TensorDescriptor(keys, cache_shape, [dim, 1], [page, dim], flat),
        TensorDescriptor(values, cache_shape, [dim, 1], [page, dim], flat),
        block_tables,
        table_rows,
        tiles,
        sinks,
        output,
        scale,
        num_tokens,
        num_works,
        block_tables.stride(0),
        HAS_ROWS=table_rows is not None,
        HAS_SINKS=sinks is not None,
        GROUP=group,
        KV_HEADS=num_kv_heads,
        PAGE=page,
        DIM=dim,
        KEYS=num_keys,
        STAGES=num_stages,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
    )
