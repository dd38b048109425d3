"""Causal attention of any number of query tokens a sequence: over this step's own keys, and paged ones before them.

A program has one tile of one sequence and one kv head. The rows of a tile are the query heads of that kv head for
consecutive tokens, so that keys are read once a group. Keys of this step are read where the projection left them;
pages are read for what was cached before the step. Tiles that every query sees whole are not masked.

The grid is an upper bound of the tiles, known from shapes alone; :func:`plan_tiles` lists them on the device, those
with most keys first. Programs beyond the last tile write the zeros of the padding behind the last sequence.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from atom.kernels.triton.attention_parts import LOG2_E, NEVER, load_pages, take_tile

MAX_PAGED_KEYS = 64  # of a tile: addresses of pages take registers that addresses in a row do not
PLAN_LANES = 128  # tiles that a program of the plan places
PLAN_SEQS = 32  # sequences that it looks through at a time


class TileShape(NamedTuple):
    """How a kernel is built: rows and keys of a tile, warps, stages, and whether descriptors load the keys.

    ``is_gluon``: the kernel for sm_90 of ``varlen_hopper`` instead of the one here.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    uses_descriptors: bool
    is_gluon: bool = False

    def tokens(self, group: int) -> int:
        """Query tokens of a tile whose kv head has ``group`` query heads."""
        return max(1, self.rows // group)


HOPPER_SHAPE = TileShape(128, 128, 12, 2, True, is_gluon=True)  # where ``varlen_hopper`` has it


@triton.jit(do_not_specialize=["num_seqs", "bound"])
def _plan(
    cu_seqlens_q,
    context_lens,
    tiles,
    num_seqs,
    bound,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    SEQS: tl.constexpr,
    WIDE: tl.constexpr,
):
    # A recorded step has room for many sequences, and few of them have tokens: the rest is not looked through.
    end = tl.load(cu_seqlens_q + num_seqs)
    num_live = 0
    for at in range(0, num_seqs, WIDE):
        seq = at + tl.arange(0, WIDE)
        first = tl.load(cu_seqlens_q + seq, mask=seq < num_seqs, other=0x7FFFFFFF)
        num_live += tl.sum((first < end).to(tl.int32), 0)
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    lane_seq = tl.zeros((LANES,), tl.int32)
    before = tl.zeros((LANES,), tl.int32)  # tiles of the sequences before the lane's
    total = 0
    for at in range(0, num_live, SEQS):
        seq = at + tl.arange(0, SEQS)
        is_seq = seq < num_live
        first = tl.load(cu_seqlens_q + seq, mask=is_seq, other=0)
        count = (tl.load(cu_seqlens_q + seq + 1, mask=is_seq, other=0) - first + TILE - 1) // TILE
        running = total + tl.cumsum(count, 0)
        is_past = (running[None, :] <= number[:, None]) & is_seq[None, :]
        lane_seq += tl.sum(is_past.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(is_past, running[None, :], 0), 1))
        total += tl.sum(count, 0)
    is_tile = number < total
    lane_seq = tl.where(is_tile, lane_seq, 0)
    local = number - before
    query_len = tl.load(cu_seqlens_q + lane_seq + 1) - tl.load(cu_seqlens_q + lane_seq)
    cost = tl.maximum(tl.load(context_lens + lane_seq) - query_len, 0) + (local + 1) * TILE
    # A tile's place: how many have more keys, and of those with as many how many belong to sequences before it.
    place = tl.zeros((LANES,), tl.int32)
    for at in range(0, num_live, SEQS):
        seq = at + tl.arange(0, SEQS)
        is_seq = seq < num_live
        first = tl.load(cu_seqlens_q + seq, mask=is_seq, other=0)
        length = tl.load(cu_seqlens_q + seq + 1, mask=is_seq, other=0) - first
        count = (length + TILE - 1) // TILE
        prefix = tl.maximum(tl.load(context_lens + seq, mask=is_seq, other=0) - length, 0)
        rest = cost[:, None] - prefix[None, :]
        # Tiles of the sequence with no more keys.
        num_less = tl.minimum(tl.maximum(rest, 0) // TILE, count[None, :])
        place += tl.sum(count[None, :] - num_less, 1)
        is_equal = (rest > 0) & (rest % TILE == 0) & (rest // TILE <= count[None, :])
        place += tl.sum((is_equal & (seq[None, :] < lane_seq[:, None])).to(tl.int32), 1)
    padding = end + (number - total) * TILE
    target = tiles + tl.where(is_tile, place, number) * 8
    is_entry = number < bound
    tl.store(target, tl.where(is_tile, lane_seq, -1), mask=is_entry)
    tl.store(target + 1, tl.where(is_tile, local * TILE, padding), mask=is_entry)
    tl.store(target + 2, tl.load(cu_seqlens_q + lane_seq), mask=is_entry)
    tl.store(target + 3, query_len, mask=is_entry)
    tl.store(target + 4, tl.load(context_lens + lane_seq), mask=is_entry)


# Steps have any number of tokens: none is worth a compilation of its own.
@triton.jit(do_not_specialize=["num_tokens"])
def _varlen(
    q,
    k,
    v,
    keys,
    values,
    tables,
    rows,
    tiles,
    sinks,
    output,
    k_scale,
    v_scale,
    scale,
    soft_cap,
    num_tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    table_stride,
    HAS_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_K: tl.constexpr,
    PAGED_K: tl.constexpr,
):
    head = tl.program_id(0)
    entry = tiles + tl.program_id(1) * 8
    seq = tl.load(entry)
    offset = tl.load(entry + 1)  # of the tile's first token in its sequence; of padding in the step
    first_token = tl.load(entry + 2)
    query_len = tl.load(entry + 3)
    context_len = tl.load(entry + 4)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    row_token = row // GROUP
    q_heads = head * GROUP + row % GROUP
    is_row = row_token < TOKENS
    if seq < 0:
        token = (offset + row_token).to(tl.int64)
        target = output + (token * (GROUP * KV_HEADS) + q_heads)[:, None] * DIM + dim[None, :]
        mask = (is_row & (token < num_tokens))[:, None] & (dim < DIM)[None, :]
        tl.store(target, tl.zeros((ROWS, DIM_PAD), output.dtype.element_ty), mask=mask)
        return

    prefix = tl.maximum(context_len - query_len, 0)
    token = (first_token + offset + row_token).to(tl.int64)
    q_mask = (is_row & (offset + row_token < query_len))[:, None] & (dim < DIM)[None, :]
    q_rows = q + token[:, None] * q_token + q_heads[:, None] * q_head + dim[None, :]
    # Selected rather than loaded with zeros: a result, unlike a load, stays in registers as an operand of products.
    tile = tl.where(q_mask, tl.load(q_rows, mask=q_mask), tl.zeros((ROWS, DIM_PAD), q.dtype.element_ty))
    best = tl.full((ROWS,), NEVER, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PAD), tl.float32)
    seen = offset + row_token  # the last key of this step that a row sees

    # Keys cached before this step. Every row sees all of them that its window reaches.
    paged_scale, weight_scale = scale, 1.0
    if HAS_SCALES:
        paged_scale = scale * tl.load(k_scale)
        weight_scale = tl.load(v_scale)
    table_row = seq.to(tl.int64)
    if HAS_ROWS:
        table_row = tl.load(rows + seq)
    table = tables + table_row * table_stride
    start = 0
    if WINDOW > 0:
        start = tl.maximum(prefix + offset - WINDOW + 1, 0) // PAGED_K * PAGED_K
    for at in range(start, prefix, PAGED_K):
        key = at + tl.arange(0, PAGED_K)
        k_tile, v_tile = load_pages(keys, values, table, key, prefix, head, KV_HEADS, PAGE, DIM, DIM_PAD)
        visible = (key < prefix)[None, :]
        if WINDOW > 0:
            visible = visible & (key[None, :] > (prefix + seen - WINDOW)[:, None])
        best, total, acc = take_tile(
            tile, best, total, acc, k_tile.to(tile.dtype), v_tile.to(tile.dtype), visible, paged_scale, soft_cap,
            weight_scale, True, HAS_SOFT_CAP, HAS_SCALES,
        )  # fmt: skip

    # Keys of this step: first the tiles that every row sees whole, then those on the diagonal.
    start = 0
    whole = (offset + 1) // TILE_K * TILE_K
    if WINDOW > 0:
        start = tl.maximum(offset - WINDOW + 1, 0) // TILE_K * TILE_K
        whole = start  # the window's edge cuts most tiles
    stop = tl.where(context_len > 0, tl.minimum(query_len, offset + TOKENS), 0)
    column = tl.arange(0, TILE_K)
    step_rows = first_token.to(tl.int64) + column
    in_head = (dim < DIM)[None, :]
    for at in range(start, tl.minimum(whole, stop), TILE_K):
        if DESCRIPTORS:
            k_tile = k.load([first_token + at, head * DIM])
            v_tile = v.load([first_token + at, head * DIM])
        else:
            k_rows = k + (step_rows + at)[:, None] * k_token + head * k_head + dim[None, :]
            v_rows = v + (step_rows + at)[:, None] * v_token + head * v_head + dim[None, :]
            if DIM == DIM_PAD:
                k_tile = tl.load(k_rows)
                v_tile = tl.load(v_rows)
            else:
                k_tile = tl.load(k_rows, mask=in_head, other=0.0)
                v_tile = tl.load(v_rows, mask=in_head, other=0.0)
        best, total, acc = take_tile(
            tile, best, total, acc, k_tile, v_tile, is_row[:, None], scale, soft_cap, 1.0, False, HAS_SOFT_CAP,
            False,
        )  # fmt: skip
    for at in range(whole, stop, TILE_K):
        key = at + column
        if DESCRIPTORS:  # past the sequence's end there are others' keys, or zeros: finite, and never visible
            k_tile = k.load([first_token + at, head * DIM])
            v_tile = v.load([first_token + at, head * DIM])
        else:
            mask = (key < stop)[:, None] & in_head
            k_rows = k + (step_rows + at)[:, None] * k_token + head * k_head + dim[None, :]
            v_rows = v + (step_rows + at)[:, None] * v_token + head * v_head + dim[None, :]
            k_tile = tl.load(k_rows, mask=mask, other=0.0)
            v_tile = tl.load(v_rows, mask=mask, other=0.0)
        visible = key[None, :] <= seen[:, None]
        if WINDOW > 0:
            visible = visible & (key[None, :] > (seen - WINDOW)[:, None])
        best, total, acc = take_tile(
            tile, best, total, acc, k_tile, v_tile, visible, scale, soft_cap, 1.0, True, HAS_SOFT_CAP, False
        )

    if HAS_SINKS:
        sink = tl.load(sinks + q_heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += tl.where(context_len > 0, tl.exp2(sink - best), 0.0)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = output + (token * (GROUP * KV_HEADS) + q_heads)[:, None] * DIM + dim[None, :]
    tl.store(target, acc.to(output.dtype.element_ty), mask=q_mask)


def tile_shape(dtype: torch.dtype, dim_pad: int, group: int, can_describe: bool) -> TileShape:
    """The kernel for such layers. ``can_describe``: whether the keys' layout has tensor descriptors."""
    if dtype.itemsize > 2:
        return TileShape(64, 32, 4 if dim_pad <= 128 else 8, 2, False)
    if dim_pad > 128:
        return TileShape(max(64, triton.next_power_of_2(group)), 32, 8, 2, False)
    if dim_pad >= 64 and can_describe:
        return TileShape(64, 64, 4, 3, True)
    return TileShape(128, 64, 8, 3, can_describe)


def layer_tile_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    has_scales: bool = False,
    measured: TileShape | None = None,
) -> TileShape:
    """The kernel that :func:`varlen_attention` takes for these.

    Args:
        measured: what was the fastest for such steps on this device, and is taken where these have the layout for it.
    """
    is_portable = measured is not None and not measured.is_gluon and not has_scales
    if is_portable and (can_describe(k, v) or not measured.uses_descriptors):
        return measured
    if window is None and soft_cap is None and not has_scales and q.is_cuda:
        from atom.kernels.triton import varlen_hopper

        is_prefill = len(q) >= varlen_hopper.MIN_TOKENS
        if is_prefill and varlen_hopper.runs_on(q.device) and varlen_hopper.fits(q, k, v, keys, values):
            return HOPPER_SHAPE
    dim_pad = max(16, triton.next_power_of_2(q.shape[2]))
    return tile_shape(q.dtype, dim_pad, q.shape[1] // k.shape[1], can_describe(k, v))


def plan_tiles(
    cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, num_tokens: int, tile_tokens: int
) -> torch.Tensor:
    """Where each program of :func:`varlen_attention` works: ``[bound, 8]`` int32.

    Sequence, first token in it, then what a program would have to look up behind these: the sequence's first token
    in the step, its query length, its context length; the rest is room. Tiles with most keys come first; behind them
    come -1 and the step's tokens behind the last sequence, in tiles alike.
    Launches one kernel and reads nothing back.
    """
    num_seqs = len(context_lens)
    bound = triton.cdiv(num_tokens, tile_tokens) + num_seqs
    tiles = torch.empty((bound, 8), dtype=torch.int32, device=cu_seqlens_q.device)
    _plan[(triton.cdiv(bound, PLAN_LANES),)](
        cu_seqlens_q,
        context_lens,
        tiles,
        num_seqs,
        bound,
        TILE=tile_tokens,
        LANES=PLAN_LANES,
        SEQS=PLAN_SEQS,
        WIDE=256,
        num_warps=8,
    )
    return tiles


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tiles: torch.Tensor | None = None,
    shape: TileShape | None = None,
) -> None:
    """Write the attention of ``q`` into ``output``.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, sequence after sequence, the last dimension contiguous.
        k: ``[num_tokens, num_kv_heads, head_dim]``, this step's keys, finite, the last dimension contiguous; ``v``
            alike.
        keys: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous; ``values`` alike. Read for what was
            cached before this step.
        block_tables: ``[rows, max_blocks]`` int32.
        table_rows: ``[num_seqs]`` int64, each sequence's row; None: sequence i has row i.
        cu_seqlens_q: ``[num_seqs + 1]`` int32; tokens from its last entry on are padding and yield zeros.
        context_lens: ``[num_seqs]`` int32, keys visible to each sequence's last query token.
        output: ``[num_tokens, num_heads, head_dim]``, contiguous.
        k_scale: ``[1]`` fp32, what a cached key is multiplied by; ``v_scale`` alike. None: 1.
        tiles: of :func:`plan_tiles` for this ``shape``; None plans.
        shape: how the kernel is built; None chooses.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    dim_pad = max(16, triton.next_power_of_2(dim))
    if shape is None:
        shape = layer_tile_shape(
            q, k, v, keys, values, window=window, soft_cap=soft_cap, has_scales=k_scale is not None
        )
    tile_tokens = shape.tokens(group)
    if tiles is None:
        tiles = plan_tiles(cu_seqlens_q, context_lens, num_tokens, tile_tokens)
    if shape.is_gluon:
        from atom.kernels.triton import varlen_hopper

        varlen_hopper.launch(
            shape.keys, shape.num_stages, q, k, v, keys, values, block_tables, table_rows, tiles, output,
            scale=scale, sinks=sinks,
        )  # fmt: skip
        return
    k_source, v_source = k, v
    if shape.uses_descriptors:
        k_source, v_source = _describe(k, shape.keys), _describe(v, shape.keys)
    _varlen[(num_kv_heads, len(tiles))](
        q,
        k_source,
        v_source,
        keys,
        values,
        block_tables,
        table_rows,
        tiles,
        sinks,
        output,
        k_scale,
        v_scale,
        scale,
        soft_cap or 0.0,
        num_tokens,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        block_tables.stride(0),
        HAS_ROWS=table_rows is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_SCALES=k_scale is not None,
        DESCRIPTORS=shape.uses_descriptors,
        WINDOW=window or 0,
        GROUP=group,
        KV_HEADS=num_kv_heads,
        PAGE=keys.shape[2],
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=max(shape.rows, triton.next_power_of_2(group)),
        TOKENS=tile_tokens,
        TILE_K=shape.keys,
        PAGED_K=min(shape.keys, MAX_PAGED_KEYS),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def can_describe(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether tensor descriptors can load the heads of ``k`` and ``v``: powers of two, at multiples of 16 bytes."""
    dim, size = k.shape[2], k.element_size()
    return (
        dim >= 16
        and dim & (dim - 1) == 0
        and all(
            t.stride(1) == dim and t.stride(0) * size % 16 == 0 and t.data_ptr() % 16 == 0 for t in (k, v)
        )
    )


def _describe(heads: torch.Tensor, num_keys: int) -> TensorDescriptor:
    """A descriptor of ``heads [num_tokens, num_heads, dim]`` as rows of all heads; it loads one head of some rows."""
    num_tokens, num_heads, dim = heads.shape
    return TensorDescriptor(heads, [num_tokens, num_heads * dim], [heads.stride(0), 1], [num_keys, dim])
