"""Inputs of a step with prompt tokens, in one launch that a recorded graph can hold; and patches of the tables alone.

Everything that changes from step to step lies in the packed buffer, the counts too. Every program applies all patches
of the block tables itself before it reads them: the values are the same whoever writes, and a barrier is enough.
"""

import torch
import triton
import triton.language as tl

TOKENS = 128  # that a program prepares
SEQS = 32  # that it looks through at a time
PATCHES = 256  # that it applies at a time
MOST_TAKEN = 4096  # elements of a step that a launch reads from the host's memory itself


@triton.jit
def _patch(at, count, table, table_stride, WIDTH: tl.constexpr):
    """Write ``count`` patches (row, column, block) that begin at ``at`` into a block table."""
    for first in range(0, count, WIDTH):
        number = first + tl.arange(0, WIDTH)
        is_patch = number < count
        row = tl.load(at + 3 * number, mask=is_patch, other=0).to(tl.int64)
        column = tl.load(at + 3 * number + 1, mask=is_patch, other=0)
        block = tl.load(at + 3 * number + 2, mask=is_patch, other=0)
        tl.store(table + row * table_stride + column, block, mask=is_patch)


@triton.jit(do_not_specialize=["n"])
def _patch_tables(
    packed,
    tables,  # [GROUPS, rows, columns]
    n,
    group_stride,
    table_stride,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    header = packed + 3 * n
    at = header + 2 + GROUPS
    for group in tl.static_range(GROUPS):
        count = tl.load(header + 2 + group)
        _patch(at, count, tables + group * group_stride, table_stride, WIDTH)
        at += 3 * count


@triton.jit(do_not_specialize=["n", "num_patches"])
def _take_decode(
    host,  # in pinned memory
    packed,
    tables,  # [GROUPS, rows, columns]
    n,
    num_patches,
    group_stride,
    table_stride,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # No load depends on another one: all of them are under way to the host's memory at once.
    index = tl.arange(0, WIDTH)
    header = host + 3 * n
    at = header + 2 + GROUPS
    for first in range(0, num_patches, WIDTH):
        number = first + index
        is_patch = number < num_patches
        row = tl.load(at + 3 * number, mask=is_patch, other=0).to(tl.int64)
        column = tl.load(at + 3 * number + 1, mask=is_patch, other=0)
        block = tl.load(at + 3 * number + 2, mask=is_patch, other=0)
        table = tl.zeros((WIDTH,), tl.int64)
        end = 0
        for group in tl.static_range(GROUPS - 1):
            end += tl.load(header + 2 + group)
            table += tl.where(number >= end, group_stride, 0)
        tl.store(tables + table + row * table_stride + column, block, mask=is_patch)
    for first in range(0, 2 * n, WIDTH):
        number = first + index
        is_used = number < 2 * n
        tl.store(packed + number, tl.load(host + number, mask=is_used, other=0), mask=is_used)


@triton.jit(do_not_specialize=["n", "num_tokens", "slot_stride"])
def _prepare_tokens(
    packed,
    computed,
    last_token,
    tables,  # [GROUPS, rows, columns]
    rows,
    input_ids,
    positions,
    cu_seqlens,
    context_lens,
    slots,  # [GROUPS, num_tokens], rows slot_stride apart
    n,
    num_tokens,
    slot_stride,
    trash_row,
    group_stride,
    table_stride,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PATCH_WIDTH: tl.constexpr,
):
    header = packed + 3 * n
    num_prefill = tl.load(header)
    first_id = tl.load(header + 1)
    at = header + 2 + GROUPS
    for group in tl.static_range(GROUPS):
        count = tl.load(header + 2 + group)
        _patch(at, count, tables + group * group_stride, table_stride, PATCH_WIDTH)
        at += 3 * count
    tl.debug_barrier()

    num_own = tl.where(tl.program_id(0) == 0, n, 0)  # the first program writes what there is one a sequence
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.zeros((BLOCK,), tl.int32)  # sequences that end at or before the token
    begin = tl.zeros((BLOCK,), tl.int32)  # where the owner's tokens begin
    total = 0
    for at_seq in range(0, n, WIDTH):
        seq = at_seq + tl.arange(0, WIDTH)
        is_seq = seq < n
        row = tl.load(packed + seq, mask=is_seq, other=trash_row).to(tl.int64)
        length = tl.load(packed + n + seq, mask=is_seq, other=0)
        end = total + tl.cumsum(length, 0)
        is_past = (end[None, :] <= token[:, None]) & is_seq[None, :]
        owner += tl.sum(is_past.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(is_past, end[None, :], 0), 1))
        total += tl.sum(length, 0)
        is_mine = seq < num_own
        is_prompt = seq < num_prefill
        start = tl.load(packed + 2 * n + seq, mask=is_mine & is_prompt, other=0)
        start += tl.load(computed + row, mask=is_mine & (seq >= num_prefill), other=0)
        tl.store(rows + seq, row, mask=is_mine)
        tl.store(cu_seqlens + 1 + seq, end, mask=is_mine)
        tl.store(context_lens + seq, tl.where(row != trash_row, start + length, 0), mask=is_mine)
    tl.store(cu_seqlens, 0)

    is_token = token < num_tokens
    owner = tl.minimum(owner, n - 1)
    row = tl.load(packed + owner, mask=is_token, other=trash_row).to(tl.int64)
    is_live = is_token & (token < total) & (row != trash_row)
    is_prompt = owner < num_prefill
    start = tl.load(packed + 2 * n + owner, mask=is_live & is_prompt, other=0)
    start += tl.load(computed + row, mask=is_live & (owner >= num_prefill), other=0)
    position = tl.where(is_live, start + token - begin, 0)
    index = tl.load(packed + first_id + token, mask=is_live & is_prompt, other=0).to(tl.int64)
    index += tl.load(last_token + row, mask=is_live & (owner >= num_prefill), other=0)
    tl.store(input_ids + token, index, mask=is_token)
    tl.store(positions + token, position.to(tl.int64), mask=is_token)
    for group in tl.static_range(GROUPS):
        entry = tables + group * group_stride + row * table_stride + position // PAGE
        slot = tl.load(entry, mask=is_live, other=0).to(tl.int64) * PAGE + position % PAGE
        tl.store(slots + group * slot_stride + token, tl.where(is_live, slot, -1), mask=is_token)


def patch_tables(packed: torch.Tensor, tables: torch.Tensor, n: int) -> None:
    """Write the patches of a packed step of ``n`` sequences into ``tables [groups, R + 1, columns]`` int32."""
    _patch_tables[(1,)](
        packed, tables, n, tables.stride(0), tables.stride(1), GROUPS=len(tables), WIDTH=PATCHES, num_warps=4,
    )  # fmt: skip


def take_decode(
    host: torch.Tensor, packed: torch.Tensor, tables: torch.Tensor, n: int, num_patches: int
) -> None:
    """Read a packed decode step of ``n`` sequences from pinned memory: its patches go into ``tables``, its rows and
    lengths to ``packed``. For as much as the copy engine takes longer to be switched to than to read.
    """
    _take_decode[(1,)](
        host, packed, tables, n, num_patches, tables.stride(0), tables.stride(1), GROUPS=len(tables), WIDTH=PATCHES,
        num_warps=4,
    )  # fmt: skip


def prepare_tokens(
    packed: torch.Tensor,
    computed: torch.Tensor,
    last_token: torch.Tensor,
    tables: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    trash_row: int,
    block_size: int,
) -> None:
    """Apply a step's patches and write its inputs, as :meth:`DeviceTables.apply` and ``derive`` do.

    Args:
        packed: the step's buffer (``input_packer``), int32.
        computed: ``[R + 1]`` int32; last_token ``[R + 1]`` int64; neither is written.
        tables: ``[groups, R + 1, columns]`` int32, patched.
        outputs: rows ``[n]``, input ids and positions ``[num_tokens]`` int64, cu_seqlens ``[n + 1]``, context_lens
            ``[n]`` int32, slots ``[groups, num_tokens]`` int64. ``num_tokens`` is at least the step's: tokens behind
            its last sequence get id and position 0 and slot -1, as do tokens of ``trash_row``.
    """
    rows, input_ids, positions, cu_seqlens, context_lens, slots = outputs
    num_tokens = len(input_ids)
    _prepare_tokens[(triton.cdiv(num_tokens, TOKENS),)](
        packed, computed, last_token, tables, rows, input_ids, positions, cu_seqlens, context_lens, slots,
        len(rows), num_tokens, slots.stride(0), trash_row, tables.stride(0), tables.stride(1),
        GROUPS=len(tables), PAGE=block_size, BLOCK=TOKENS, WIDTH=SEQS, PATCH_WIDTH=PATCHES, num_warps=4,
    )  # fmt: skip
