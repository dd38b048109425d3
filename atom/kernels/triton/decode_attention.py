"""Attention of one query token a sequence over the paged cache.

A program has one sequence, one kv head and one split of its keys; the query heads of the kv head are the rows of one
tile. Splits exist so that few sequences fill the device; the last program of a kv head to arrive adds them up, in the
same launch (see ``attention_parts``).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from atom.kernels.triton.attention_parts import LOG2_E, NEVER, add_shares, arrive, load_pages, take_tile
from atom.kernels.triton.hopper import MULTIPROCESSORS


class DecodeShape(NamedTuple):
    """How a kernel is built: programs a sequence and kv head, keys of a tile, warps, stages."""

    splits: int
    keys: int
    num_warps: int
    num_stages: int


SPLITS = (16, 8, 4)  # few choices: each is a kernel to compile
MAX_PROGRAMS = 4 * MULTIPROCESSORS
NUM_ARRIVALS = MAX_PROGRAMS // SPLITS[-1]  # kv heads of all sequences of a step whose keys are split


@triton.jit
def _write(
    best,  # [M]
    total,  # [M]
    acc,  # [M, DIM_PAD]
    sinks,  # of the kv head's first query head on
    output,  # alike
    context_len,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write what a kv head's query heads have gathered."""
    member = tl.arange(0, acc.shape[0])
    dim = tl.arange(0, acc.shape[1])
    is_head = member < GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + member, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        total += tl.where(context_len > 0, tl.exp2(sink - best), 0.0)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = output + member[:, None] * DIM + dim[None, :]
    tl.store(target, acc.to(output.dtype.element_ty), mask=is_head[:, None] & (dim < DIM)[None, :])


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
    arrivals,
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
    MEMBERS: tl.constexpr,  # GROUP, padded
    AHEAD: tl.constexpr,  # shares that are loaded together
):
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context_len - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(context_len - first, SPLITS), TILE) * TILE
    if SPLITS > 1:
        share = tl.maximum(share, TILE)
        num_shares = tl.maximum(tl.cdiv(context_len - first, share), 1)
        if split >= num_shares:
            return
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
    if HAS_SINKS:
        sinks += head * GROUP
    q_row = (seq * KV_HEADS + head) * GROUP
    output += q_row * DIM
    if SPLITS == 1 or num_shares == 1:
        _write(best, total, acc, sinks, output, context_len, GROUP, DIM, HAS_SINKS)
    else:
        stats = partial + tl.num_programs(1).to(tl.int64) * (KV_HEADS * GROUP * SPLITS * DIM_PAD)
        counter = arrivals + seq * KV_HEADS + head
        row = q_row * SPLITS + split * GROUP + member
        if arrive(best, total, acc, partial, stats, counter, row, member < GROUP, num_shares, DIM_PAD):
            few = tl.arange(0, MEMBERS)
            first_row = q_row * SPLITS + few
            peak, weight, values_sum = add_shares(
                partial, stats, first_row, few < GROUP, num_shares, MEMBERS, DIM_PAD, GROUP, AHEAD
            )
            _write(peak, weight, values_sum, sinks, output, context_len, GROUP, DIM, HAS_SINKS)


def num_splits(num_seqs: int, num_kv_heads: int) -> int:
    """Splits of a sequence's keys. They depend on shapes alone, so that a graph can hold them."""
    return next((n for n in SPLITS if num_seqs * num_kv_heads * n <= MAX_PROGRAMS), 1)


def shares_ahead(share_size: int, splits: int) -> int:
    """Shares of so many numbers that are loaded together: up to 64 numbers a thread of four warps."""
    return max(1, min(splits, 8, 8192 // share_size))


def arrival_counters(device: torch.device) -> torch.Tensor:
    """``[NUM_ARRIVALS]`` int32 zeros: enough for any launch whose shape is chosen here."""
    return torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=device)


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
    arrivals: torch.Tensor,
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
        arrivals: of ``arrival_counters``, left as they were; launches that may run side by side need their own.
        k_scale: ``[1]`` fp32, what a cached key is multiplied by; ``v_scale`` alike. None: 1.
        shape: how the kernel is built; None chooses.

    Raises:
        ValueError: keys are split, and ``arrivals`` has too few counters for the kv heads of all sequences.
    """
    num_seqs, num_heads, dim = q.shape
    num_kv_heads, page = keys.shape[1:3]
    dim_pad = max(16, triton.next_power_of_2(dim))
    shape = shape or decode_shape(num_seqs, num_kv_heads, dim_pad * q.element_size())
    splits = shape.splits
    group = num_heads // num_kv_heads
    members = triton.next_power_of_2(group)
    partial = None
    if splits > 1:
        if num_seqs * num_kv_heads > len(arrivals):
            raise ValueError(
                f"{num_seqs} sequences of {num_kv_heads} kv heads in {splits} splits need "
                f"{num_seqs * num_kv_heads} arrivals, more than {len(arrivals)}"
            )
        num_rows = num_seqs * num_heads * splits
        partial = torch.empty(num_rows * (dim_pad + 2), dtype=torch.float32, device=q.device)
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
        arrivals if splits > 1 else None,
        k_scale,
        v_scale,
        scale,
        soft_cap or 0.0,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        HAS_ROWS=table_rows is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SCALES=k_scale is not None,
        WINDOW=window or 0,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, members),
        PAGE=page,
        DIM=dim,
        DIM_PAD=dim_pad,
        TILE=shape.keys,
        SPLITS=splits,
        MEMBERS=members,
        AHEAD=shares_ahead(members * dim_pad, splits),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
