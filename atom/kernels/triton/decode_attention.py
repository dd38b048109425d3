"""Attention of one query token a sequence over the paged cache.

A program has one sequence, one kv head and one split of its keys; the query heads of the kv head are the rows of one
tile. Splits exist so that few sequences fill the device; a second kernel adds them up in their order, so that
results do not depend on timing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from atom.kernels.triton.attention_parts import LOG2_E, NEVER, load_pages, take_tile


class DecodeShape(NamedTuple):
    """How a kernel is built: programs a sequence and kv head, keys of a tile, warps, stages."""

    splits: int
    keys: int
    num_warps: int
    num_stages: int


SPLITS = (16, 8, 4)  # few choices: each is a kernel to compile
MAX_PROGRAMS = 528  # four for each of 132 multiprocessors


@triton.jit
def _decode(
    q,
    keys,
    values,
    tables,
    rows,
    context_lens,
    sinks,
    output,
    partial,
    stats,
    k_scale,
    v_scale,
    scale,
    soft_cap,
    q_token,
    q_head,
    table_stride,
    HAS_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context_len - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(context_len - first, SPLITS), TILE) * TILE
    start = first + split * share
    stop = tl.minimum(start + share, context_len)
    table_row = seq
    if HAS_ROWS:
        table_row = tl.load(rows + seq)
    table = tables + table_row * table_stride

    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    q_mask = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    q_head_index = head * GROUP + member
    tile = tl.load(q + seq * q_token + q_head_index[:, None] * q_head + dim[None, :], mask=q_mask, other=0.0)
    best = tl.full((GROUP_PAD,), NEVER, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, DIM_PAD), tl.float32)
    key_scale, value_scale = scale, 1.0
    if HAS_SCALES:
        key_scale = scale * tl.load(k_scale)
        value_scale = tl.load(v_scale)
    for position in range(start, stop, TILE):
        token = position + tl.arange(0, TILE)
        k, v = load_pages(keys, values, table, token, stop, head, KV_HEADS, PAGE, DIM, DIM_PAD)
        best, total, acc = take_tile(
            tile, best, total, acc, k.to(tile.dtype), v.to(tile.dtype), (token < stop)[None, :], key_scale,
            soft_cap, value_scale, True, HAS_SOFT_CAP, HAS_SCALES,
        )  # fmt: skip
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + q_head_index, mask=member < GROUP, other=0.0) * LOG2_E
            total += tl.where(context_len > 0, tl.exp2(sink - best), 0.0)
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        target = output + (seq * KV_HEADS * GROUP + q_head_index)[:, None] * DIM + dim[None, :]
        tl.store(target, acc.to(output.dtype.element_ty), mask=q_mask)
    else:
        base = (seq * KV_HEADS * GROUP + q_head_index) * SPLITS + split
        tl.store(partial + base[:, None] * DIM_PAD + dim[None, :], acc, mask=(member < GROUP)[:, None])
        tl.store(stats + base * 2, best, mask=member < GROUP)
        tl.store(stats + base * 2 + 1, total, mask=member < GROUP)


@triton.jit
def _combine(
    partial,
    stats,
    context_lens,
    sinks,
    output,
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PAD)
    base = (seq * NUM_HEADS + head) * SPLITS + split
    best = tl.load(stats + base * 2)
    total = tl.load(stats + base * 2 + 1)
    overall = tl.max(best, 0)
    weight = tl.exp2(best - overall)
    acc = tl.load(partial + base[:, None] * DIM_PAD + dim[None, :])
    summed = tl.sum(acc * weight[:, None], 0)
    denominator = tl.sum(total * weight, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        denominator += tl.where(tl.load(context_lens + seq) > 0, tl.exp2(sink - overall), 0.0)
    result = summed / tl.where(denominator > 0.0, denominator, 1.0)
    target = output + (seq * NUM_HEADS + head) * DIM + dim
    tl.store(target, result.to(output.dtype.element_ty), mask=dim < DIM)


def num_splits(num_seqs: int, num_kv_heads: int) -> int:
    """Splits of a sequence's keys. They depend on shapes alone, so that a graph can hold them."""
    return next((n for n in SPLITS if num_seqs * num_kv_heads * n <= MAX_PROGRAMS), 1)


def decode_shape(num_seqs: int, num_kv_heads: int, row_bytes: int) -> DecodeShape:
    """The kernel for a step. ``row_bytes``: of a padded head."""
    splits = num_splits(num_seqs, num_kv_heads)
    return DecodeShape(
        splits,
        keys=32 if row_bytes > 256 else 64,
        num_warps=4 if splits > 1 or row_bytes > 256 else 2,
        num_stages=2 if row_bytes > 512 else 3,
    )


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor | None,
    context_lens: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    shape: DecodeShape | None = None,
) -> None:
    """Write the attention of ``q``, one token a sequence, into ``output``.

    Args:
        q: ``[num_seqs, num_heads, head_dim]``, the last dimension contiguous.
        keys: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous; ``values`` alike.
        block_tables: ``[rows, max_blocks]`` int32.
        table_rows: ``[num_seqs]`` int64, each sequence's row; None: sequence i has row i.
        context_lens: ``[num_seqs]`` int32, keys of each sequence; 0 yields zeros.
        output: ``[num_seqs, num_heads, head_dim]``, contiguous.
        k_scale: ``[1]`` fp32, what a cached key is multiplied by; ``v_scale`` alike. None: 1.
        shape: how the kernel is built; None chooses.
    """
    num_seqs, num_heads, dim = q.shape
    num_kv_heads, page = keys.shape[1:3]
    dim_pad = max(16, triton.next_power_of_2(dim))
    shape = shape or decode_shape(num_seqs, num_kv_heads, dim_pad * q.element_size())
    splits = shape.splits
    group = num_heads // num_kv_heads
    partial = stats = output
    if splits > 1:
        size = num_seqs * num_heads * splits
        partial = torch.empty(size * dim_pad, dtype=torch.float32, device=q.device)
        stats = torch.empty(size * 2, dtype=torch.float32, device=q.device)
    has_sinks = sinks is not None
    _decode[(num_kv_heads, num_seqs, splits)](
        q,
        keys,
        values,
        block_tables,
        table_rows,
        context_lens,
        sinks,
        output,
        partial,
        stats,
        k_scale,
        v_scale,
        scale,
        soft_cap or 0.0,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        HAS_ROWS=table_rows is not None,
        HAS_SINKS=has_sinks,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SCALES=k_scale is not None,
        WINDOW=window or 0,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        PAGE=page,
        DIM=dim,
        DIM_PAD=dim_pad,
        TILE=shape.keys,
        SPLITS=splits,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if splits > 1:
        _combine[(num_seqs, num_heads)](
            partial,
            stats,
            context_lens,
            sinks,
            output,
            HAS_SINKS=has_sinks,
            NUM_HEADS=num_heads,
            DIM=dim,
            DIM_PAD=dim_pad,
            SPLITS=splits,
            num_warps=1,
        )
