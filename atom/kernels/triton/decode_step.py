"""What stands around the layers of a decode step: its inputs, the embedding, the final norm, the chosen ids."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.decode_parts import LOWEST, pdl_options

MIN_BLOCK = 32  # a warp: narrower blocks would be kernels of their own and no faster


# Steps have any number of sequences: none is worth a compilation of its own.
@triton.jit(do_not_specialize=["n", "slot_stride"])
def _prepare(
    packed,  # rows [n], then query lengths [n]
    computed,
    last_token,
    tables,  # [GROUPS, rows, columns]
    rows,
    input_ids,
    positions,
    cu_seqlens,
    context_lens,
    slots,  # [GROUPS, n], rows slot_stride apart
    n,
    slot_stride,
    trash_row,
    group_stride,
    table_stride,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    IS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    row = tl.load(packed + i, mask=mask, other=trash_row).to(tl.int64)
    start = tl.load(computed + row, mask=mask, other=0)
    is_live = row != trash_row
    if IS_PADDED:
        start = tl.where(is_live, start, 0)
    tl.store(rows + i, row, mask=mask)
    tl.store(input_ids + i, tl.load(last_token + row, mask=mask, other=0), mask=mask)
    tl.store(positions + i, start.to(tl.int64), mask=mask)
    length = start + tl.load(packed + n + i, mask=mask, other=0)
    if IS_PADDED:
        length = tl.where(is_live, length, 0)
    tl.store(context_lens + i, length, mask=mask)
    tl.store(cu_seqlens + i, i, mask=mask)
    tl.store(cu_seqlens + n, n)
    for group in tl.static_range(GROUPS):
        entry = tables + group * group_stride + row * table_stride + start // PAGE
        slot = tl.load(entry, mask=mask, other=0).to(tl.int64) * PAGE + start % PAGE
        if IS_PADDED:
            slot = tl.where(is_live, slot, -1)
        tl.store(slots + group * slot_stride + i, slot, mask=mask)


def prepare_decode(
    packed: torch.Tensor,
    computed: torch.Tensor,
    last_token: torch.Tensor,
    tables: torch.Tensor,
    n: int,
    trash_row: int,
    block_size: int,
    is_padded: bool,
    embedding: Embedding | None = None,
    uses_pdl: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Inputs of a step that decodes one token of each of ``n`` sequences, in one launch.

    Args:
        packed: the step's buffer: rows ``[n]``, then query lengths ``[n]``, int32.
        computed: ``[R + 1]`` int32; last_token ``[R + 1]`` int64.
        tables: ``[groups, R + 1, columns]`` int32.
        is_padded: sequences of ``trash_row`` get length and position 0 and slot -1.
        embedding: what :func:`embed` would do next is then done in the same launch.
        uses_pdl: let the kernel behind that launch begin, up to its wait, while this one runs.

    Returns:
        rows, input ids, positions ``[n]`` int64, cu_seqlens ``[n + 1]``, context_lens ``[n]`` int32, slots
        ``[groups, n]`` int64.
    """
    whole, device = torch.int64, packed.device
    even = n + n % 2  # every row begins at 16 bytes: kernels are compiled for that
    rows, input_ids, positions = torch.empty((3, even), dtype=whole, device=device)[:, :n]
    slots = torch.empty((len(tables), even), dtype=whole, device=device)[:, :n]
    cu_seqlens = torch.empty(n + 1, dtype=torch.int32, device=device)
    context_lens = torch.empty(n, dtype=torch.int32, device=device)
    arguments = (
        packed, computed, last_token, tables, rows, input_ids, positions, cu_seqlens, context_lens, slots,
        n, slots.stride(0), trash_row, tables.stride(0), tables.stride(1),
    )  # fmt: skip
    options = {"GROUPS": len(tables), "PAGE": block_size, "IS_PADDED": is_padded}
    if embedding is not None:
        e = embedding
        _prepare_and_embed[(n,)](
            *arguments, *e.arguments, **options, **e.options, PDL=uses_pdl, num_warps=4,
        )  # fmt: skip
    else:
        block = min(128, max(MIN_BLOCK, triton.next_power_of_2(n)))
        _prepare[(triton.cdiv(n, block),)](*arguments, **options, BLOCK=block, num_warps=1)
    return rows, input_ids, positions, cu_seqlens, context_lens, slots


@triton.jit
def _embed_token(
    token,
    index,
    position,
    table,
    inv_freq,  # [ROPES, DIM] fp32
    sign,  # [ROPES, DIM] fp32: the factor of sin
    factor,  # [ROPES] fp32: the factor of cos
    x,
    cos,  # [tokens, ROPES, DIM]
    sin,
    keys,
    next_norm,
    next_x,
    squares,
    scale,
    num_rows,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPES: tl.constexpr,
    DIM: tl.constexpr,
    IS_SCALED: tl.constexpr,
    HAS_NEXT: tl.constexpr,
):
    # Everything is asked for before anything is written: a load behind a store would wait for what is stored.
    index = tl.minimum(tl.maximum(index, 0), num_rows - 1)
    channel = tl.arange(0, DIM)
    values, norms = (), ()
    for start in tl.static_range(0, H, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = values + (tl.load(table + index * H + column, mask=column < H, other=0.0),)
        if HAS_NEXT:
            norms = norms + (tl.load(next_norm + column, mask=column < H, other=0.0),)
    frequencies, signs, factors = (), (), ()
    for rope in tl.static_range(ROPES):
        frequencies = frequencies + (tl.load(inv_freq + rope * DIM + channel),)
        signs = signs + (tl.load(sign + rope * DIM + channel),)
        factors = factors + (tl.load(factor + rope),)
    total = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range((H + BLOCK - 1) // BLOCK):
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        value = values[chunk]
        if IS_SCALED:
            value = (value.to(tl.float32) * scale).to(x.dtype.element_ty)
        tl.store(x + token * H + column, value, mask=column < H)
        if HAS_NEXT:
            wide = value.to(tl.float32)
            scaled = (wide * norms[chunk].to(tl.float32)).to(x.dtype.element_ty)
            tl.store(next_x + token * H + column, scaled, mask=column < H)
            total += wide * wide
    if HAS_NEXT:
        tl.store(squares + token, tl.sum(total, 0))
    for rope in tl.static_range(ROPES):
        angle = position.to(tl.float32) * frequencies[rope]
        place = (token * ROPES + rope) * DIM + channel
        # Rounded to the model's dtype, as its own rotation is.
        tl.store(cos + place, (tl.cos(angle) * factors[rope]).to(cos.dtype.element_ty))
        tl.store(sin + place, (tl.sin(angle) * signs[rope]).to(sin.dtype.element_ty))
    tl.store(keys + token, LOWEST)


@triton.jit
def _embed(
    input_ids,
    positions,
    table,
    inv_freq,
    sign,
    factor,
    x,
    cos,
    sin,
    keys,
    next_norm,
    next_x,
    squares,
    scale,
    num_rows,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPES: tl.constexpr,
    DIM: tl.constexpr,
    IS_SCALED: tl.constexpr,
    HAS_NEXT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    _embed_token(
        token, tl.load(input_ids + token), tl.load(positions + token), table, inv_freq, sign, factor, x, cos, sin,
        keys, next_norm, next_x, squares, scale, num_rows, H, BLOCK, ROPES, DIM, IS_SCALED, HAS_NEXT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "slot_stride"])
def _prepare_and_embed(
    packed,
    computed,
    last_token,
    tables,
    rows,
    input_ids,
    positions,
    cu_seqlens,
    context_lens,
    slots,
    n,
    slot_stride,
    trash_row,
    group_stride,
    table_stride,
    table,
    inv_freq,
    sign,
    factor,
    x,
    cos,
    sin,
    keys,
    next_norm,
    next_x,
    squares,
    scale,
    num_rows,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    IS_PADDED: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPES: tl.constexpr,
    DIM: tl.constexpr,
    IS_SCALED: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``_prepare`` for one sequence a program, and what ``_embed`` does for its token."""
    if PDL:  # the kernel behind loads its weights meanwhile
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(packed + token).to(tl.int64)
    query_len = tl.load(packed + n + token)
    start = tl.load(computed + row)
    index = tl.load(last_token + row)
    is_live = (row != trash_row) | (not IS_PADDED)
    start = tl.where(is_live, start, 0)
    slot_of = ()
    for group in tl.static_range(GROUPS):
        block = tl.load(tables + group * group_stride + row * table_stride + start // PAGE)
        slot_of = slot_of + (block.to(tl.int64) * PAGE + start % PAGE,)
    _embed_token(
        token, index, start, table, inv_freq, sign, factor, x, cos, sin, keys, next_norm, next_x, squares, scale,
        num_rows, H, BLOCK, ROPES, DIM, IS_SCALED, HAS_NEXT,
    )  # fmt: skip
    tl.store(rows + token, row)
    tl.store(input_ids + token, index)
    tl.store(positions + token, start.to(tl.int64))
    tl.store(context_lens + token, tl.where(is_live, start + query_len, 0))
    tl.store(cu_seqlens + token, token.to(tl.int32))
    tl.store(cu_seqlens + n, n)
    for group in tl.static_range(GROUPS):
        tl.store(slots + group * slot_stride + token, tl.where(is_live, slot_of[group], -1))


class Embedding(NamedTuple):
    """What a step begins with beside ids and positions: rows of ``x``, ``cos``, ``sin``, ``keys`` for every token.

    Args:
        table: ``[vocab, hidden_size]``.
        rope: inverse frequencies and factors of sin, each ``[ropes, dim]`` fp32, factors of cos ``[ropes]``;
            ``dim`` a power of two.
        x: ``[n, hidden_size]``, written; cos, sin ``[n, ropes, dim]``, keys ``[n]`` int64 alike.
        scale: what rows of the table are multiplied by.
        half_norm: the first norm's weight ``[hidden_size]``; written are x times it, as ``x``, and each token's sum
            of squares, fp32 ``[n]``. None: the norm is left to the launch behind.
    """

    table: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    keys: torch.Tensor
    scale: float = 1.0
    half_norm: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        half_norm = self.half_norm or (None, None, None)
        rooms = (self.x, self.cos, self.sin, self.keys)
        return self.table, *self.rope, *rooms, *half_norm, self.scale, len(self.table)

    @property
    def options(self) -> dict[str, int | bool]:
        hidden_size, (ropes, dim) = self.table.shape[1], self.rope[0].shape
        block = min(1024, triton.next_power_of_2(hidden_size))
        flags = {"IS_SCALED": self.scale != 1.0, "HAS_NEXT": self.half_norm is not None}
        return {"H": hidden_size, "BLOCK": block, "ROPES": ropes, "DIM": dim, **flags}


def embed(input_ids: torch.Tensor, positions: torch.Tensor, embedding: Embedding) -> None:
    """Embedding rows, the rotations of the step's positions, and keys below all others.

    Launched without dependence, and complete before the kernel behind it lets a further one start: the ones after
    that may then read what this one writes before they wait.

    Args:
        input_ids: ``[n]`` int64; positions alike.
    """
    _embed[(len(input_ids),)](input_ids, positions, *embedding.arguments, **embedding.options, num_warps=4)


@triton.jit
def _final_norm(x, norm, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    factor = tl.load(norm + column, mask=column < H, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + token * H + column, mask=column < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    tl.store(out + token * H + column, (value * scale * factor).to(out.dtype.element_ty), mask=column < H)


def final_norm(
    x: torch.Tensor, norm: torch.Tensor, out: torch.Tensor, eps: float, uses_pdl: bool = False
) -> None:
    """``out = rms_norm(x) * norm``, each ``[n, hidden_size]``."""
    hidden_size = x.shape[1]
    _final_norm[(len(x),)](
        x, norm, out, eps, H=hidden_size, BLOCK=triton.next_power_of_2(hidden_size), PDL=uses_pdl, num_warps=4,
        **pdl_options(uses_pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["room", "n"])
def _choose(
    keys,
    rows,
    context_lens,
    computed,
    last_token,
    token_ids,
    is_finite,
    number,
    host_ids,  # [SLOTS, room + 1], the step's number first
    host_flags,  # [SLOTS, room]
    room,
    n,
    ADVANCES: tl.constexpr,
    SLOTS: tl.constexpr,  # 0: nothing goes to the host
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i = tl.arange(0, BLOCK)
    mask = i < n
    # Of these none is written behind the step's first kernel.
    if ADVANCES:
        row = tl.load(rows + i, mask=mask, other=0)
        length = tl.load(context_lens + i, mask=mask, other=0)
    if SLOTS:
        count = tl.load(number) + 1
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = tl.load(keys + i, mask=mask, other=0)
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    flag = (bits & 0x7F800000) != 0x7F800000
    if SLOTS:  # first: it has the longest way
        slot = count % SLOTS
        ids = host_ids + slot * (room + 1)
        tl.store(ids + 1 + i, token, mask=mask)
        tl.store(host_flags + slot * room + i, flag, mask=mask)
        tl.store(ids, count)
        tl.store(number, count)
    tl.store(token_ids + i, token, mask=mask)
    tl.store(is_finite + i, flag, mask=mask)
    if ADVANCES:
        tl.store(computed + row, length, mask=mask)
        tl.store(last_token + row, token, mask=mask)


def choose(
    keys: torch.Tensor,
    token_ids: torch.Tensor,
    is_finite: torch.Tensor,
    advance: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    uses_pdl: bool = False,
    outbox: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """The ids that keys stand for, what the tables then say, and what the host gets.

    Args:
        keys: ``[n]`` int64 of the head.
        token_ids: ``[n]`` int64, written; is_finite ``[n]`` bool, whether the best logit is.
        advance: rows ``[n]`` int64 and context lengths ``[n]`` int32 of the step; ``computed`` int32 and
            ``last_token`` int64 of the device tables, which take over the lengths and ids at those rows.
        outbox: number of steps so far ``[1]`` int64, which is raised; in pinned memory ``[slots, room + 1]`` int64
            and ``[slots, room]`` bool: slot ``number % slots`` gets the number, the ids and the flags. ``room`` is at
            least n.
    """
    n = len(keys)
    number, host_ids, host_flags = outbox or (None, None, None)
    slots, room = (0, 0) if outbox is None else host_flags.shape
    _choose[(1,)](
        keys, *(advance or (None, None, None, None))[:4], token_ids, is_finite, number, host_ids, host_flags,
        room, n, ADVANCES=advance is not None, SLOTS=slots, BLOCK=max(MIN_BLOCK, triton.next_power_of_2(n)),
        PDL=uses_pdl, num_warps=1, **pdl_options(uses_pdl),
    )  # fmt: skip
