"""Causal attention of any number of query tokens a sequence over the paged cache.

A program has one tile of ``TILE_Q`` query tokens of one sequence and one query head. The grid is an upper bound of
the tiles, known from shapes alone; each program finds its sequence in the running sums of tiles. Programs beyond the
last tile write the zeros of the padding behind the last sequence.
"""

import torch
import triton
import triton.language as tl

from atom.kernels.triton.attention_parts import LOG2_E, NEVER, add_tile

TILE_Q = 64


# Steps have any number of sequences and tokens: none of them is worth a compilation of its own, least of all 1.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _varlen(
    q,
    keys,
    values,
    tables,
    rows,
    cu_seqlens_q,
    context_lens,
    cu_tiles,
    sinks,
    output,
    scale,
    soft_cap,
    num_seqs,
    num_tokens,
    q_token,
    q_head,
    table_stride,
    HAS_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
):
    number = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.arange(0, TILE_Q)
    dim = tl.arange(0, DIM_PAD)
    num_tiles = tl.load(cu_tiles + num_seqs - 1)
    if number >= num_tiles:
        token = tl.load(cu_seqlens_q + num_seqs) + (number - num_tiles) * TILE_Q + row
        target = output + (token.to(tl.int64) * NUM_HEADS + head)[:, None] * DIM + dim[None, :]
        mask = (token < num_tokens)[:, None] & (dim < DIM)[None, :]
        tl.store(target, tl.zeros((TILE_Q, DIM_PAD), output.dtype.element_ty), mask=mask)
        return

    # The first sequence whose tiles end behind this one.
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_tiles + middle) > number:
            high = middle
        else:
            low = middle + 1
    seq = low
    tiles_before = 0
    if seq > 0:
        tiles_before = tl.load(cu_tiles + seq - 1)
    first_token = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    context_len = tl.load(context_lens + seq)
    offset = (number - tiles_before) * TILE_Q
    position = context_len - query_len + offset + row  # of each query in its sequence
    token = (first_token + offset + row).to(tl.int64)
    q_mask = (offset + row < query_len)[:, None] & (dim < DIM)[None, :]
    tile = tl.load(q + token[:, None] * q_token + head * q_head + dim[None, :], mask=q_mask, other=0.0)

    table_row = seq.to(tl.int64)
    if HAS_ROWS:
        table_row = tl.load(rows + seq)
    table = tables + table_row * table_stride
    first_position = context_len - query_len + offset
    stop = tl.minimum(context_len, first_position + TILE_Q)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(first_position - WINDOW + 1, 0) // TILE_K * TILE_K
    kv_head = head // (NUM_HEADS // KV_HEADS)
    best = tl.full((TILE_Q,), NEVER, tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    acc = tl.zeros((TILE_Q, DIM_PAD), tl.float32)
    for at in range(start, stop, TILE_K):
        key = at + tl.arange(0, TILE_K)
        visible = key[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        best, total, acc = add_tile(
            tile, best, total, acc, key, visible, table, keys, values, kv_head, scale, soft_cap, stop,
            KV_HEADS, PAGE, DIM, DIM_PAD, HAS_SOFT_CAP,
        )  # fmt: skip
    if HAS_SINKS:
        total += tl.where(context_len > 0, tl.exp2(tl.load(sinks + head) * LOG2_E - best), 0.0)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = output + (token * NUM_HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(target, acc.to(output.dtype.element_ty), mask=q_mask)


def count_tiles(cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """Running sums of each sequence's tiles, ``[num_seqs]`` int32, for :func:`varlen_attention`."""
    tiles = (cu_seqlens_q.diff() + (TILE_Q - 1)) // TILE_Q
    return tiles.cumsum(0, dtype=torch.int32)


def varlen_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    cu_tiles: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the attention of ``q`` into ``output``; its keys are already in the cache.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, sequence after sequence, the last dimension contiguous.
        keys: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous; ``values`` alike.
        block_tables: ``[rows, max_blocks]`` int32.
        table_rows: ``[num_seqs]`` int64, each sequence's row; None: sequence i has row i.
        cu_seqlens_q: ``[num_seqs + 1]`` int32; tokens from its last entry on are padding and yield zeros.
        context_lens: ``[num_seqs]`` int32, keys visible to each sequence's last query token.
        cu_tiles: ``[num_seqs]`` int32 of :func:`count_tiles`.
        output: ``[num_tokens, num_heads, head_dim]``, contiguous.
    """
    num_tokens, num_heads, dim = q.shape
    num_seqs = len(context_lens)
    dim_pad = max(16, triton.next_power_of_2(dim))
    row_bytes = dim_pad * q.element_size()
    _varlen[(triton.cdiv(num_tokens, TILE_Q) + num_seqs, num_heads)](
        q,
        keys,
        values,
        block_tables,
        table_rows,
        cu_seqlens_q,
        context_lens,
        cu_tiles,
        sinks,
        output,
        scale,
        soft_cap or 0.0,
        num_seqs,
        num_tokens,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        HAS_ROWS=table_rows is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        WINDOW=window or 0,
        NUM_HEADS=num_heads,
        KV_HEADS=keys.shape[1],
        PAGE=keys.shape[2],
        DIM=dim,
        DIM_PAD=dim_pad,
        TILE_Q=TILE_Q,
        TILE_K=64 if row_bytes <= 256 else 32,
        num_warps=4 if row_bytes <= 256 else 8,
        num_stages=3 if row_bytes <= 256 else 2,
    )
