"""Norm and rotation of query and key heads and storing keys and values, in one pass over a step's projections."""

import torch
import triton
import triton.language as tl

from atom.kernels.triton.kv_cache import finite, stored

HEADS_PER_PROGRAM = 8
MANY_TOKENS = 1024  # from here on a program takes several tokens: there are enough programs then


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_write(
    qkv,
    cos,
    sin,
    weight,
    keys,
    values,
    slots,
    key_factor,
    value_factor,
    eps,
    num_tokens,
    qkv_token,
    HAS_NORM: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # [TOKENS, HEADS, HALF_PAD]: rotations are read once for all heads, the norm's weights once for all tokens.
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    channel = tl.arange(0, HALF_PAD)[None, None, :]
    half: tl.constexpr = DIM // 2
    in_half = (channel < half) & (token < num_tokens)
    mask = (head < NUM_HEADS + 2 * KV_HEADS) & in_half
    source = qkv + token * qkv_token + head * DIM + channel
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + half, mask=mask, other=0.0)
    is_turned = head < NUM_HEADS + KV_HEADS
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(x * x + y * y, 2) / DIM + eps)[:, :, None]
        factors = weight + head * DIM + channel
        is_factor = is_turned & (channel < half)
        x = x * inverse * tl.load(factors, mask=is_factor, other=0.0)
        y = y * inverse * tl.load(factors + half, mask=is_factor, other=0.0)
        x = x.to(first.dtype).to(tl.float32)
        y = y.to(first.dtype).to(tl.float32)
    row = token * DIM + channel
    turned_x = x * tl.load(cos + row, mask=in_half, other=0.0).to(tl.float32)
    turned_x += y * tl.load(sin + row, mask=in_half, other=0.0).to(tl.float32)
    turned_y = y * tl.load(cos + row + half, mask=in_half, other=0.0).to(tl.float32)
    turned_y += x * tl.load(sin + row + half, mask=in_half, other=0.0).to(tl.float32)
    new_first = tl.where(is_turned, turned_x.to(first.dtype), first)
    new_second = tl.where(is_turned, turned_y.to(first.dtype), second)
    # Keys and values are read again from here: by attention, which multiplies what it masks by zero.
    is_kept = head >= NUM_HEADS
    new_first = tl.where(is_kept, finite(new_first), new_first)
    new_second = tl.where(is_kept, finite(new_second), new_second)
    # Values change only where one is not finite. Asked for a head at a time: a mask that differed within a head
    # would cut the stores of all heads into single elements.
    is_bad = ((first - first != 0.0) | (second - second != 0.0)) & mask
    is_changed = mask & (is_turned | (tl.max(is_bad.to(tl.int32), 2)[:, :, None] > 0))
    tl.store(source, new_first, mask=is_changed)
    tl.store(source + half, new_second, mask=is_changed)

    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    is_stored = mask & is_kept & (slot >= 0)
    is_key = is_kept & is_turned
    kv_head = head - NUM_HEADS - tl.where(is_key, 0, KV_HEADS)
    place = ((slot // PAGE) * KV_HEADS + kv_head) * PAGE * DIM + (slot % PAGE) * DIM + channel
    if HAS_FACTORS:
        factor = tl.where(is_key, tl.load(key_factor), tl.load(value_factor))
        new_first = new_first.to(tl.float32) / factor
        new_second = new_second.to(tl.float32) / factor
    kind: tl.constexpr = keys.dtype.element_ty
    own_first, own_second = stored(new_first, kind), stored(new_second, kind)
    tl.store(keys + place, own_first, mask=is_stored & is_key)
    tl.store(keys + place + half, own_second, mask=is_stored & is_key)
    tl.store(values + place, own_first, mask=is_stored & (is_turned == 0))
    tl.store(values + place + half, own_second, mask=is_stored & (is_turned == 0))


def rotate_and_write(
    qkv: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    heads_per_program: int = HEADS_PER_PROGRAM,
    tokens_per_program: int | None = None,
    num_warps: int = 4,
) -> None:
    """Norm and rotate the query and key heads of ``qkv`` where they are, and store its keys and values.

    A key or value that is not finite becomes 0, in ``qkv`` and in the cache.

    Args:
        qkv: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``: query, key and value heads; contiguous.
        cos: ``[num_tokens, 1, head_dim]`` in qkv's dtype, as the kernel "rotary" takes it; ``sin`` alike.
        weight: ``[num_heads + num_kv_heads, head_dim]`` fp32 of the norm; None: no norm.
        keys: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous, written; ``values`` alike.
        slots: ``[num_tokens]`` int64; a token with slot -1 is not stored.
        k_scale: ``[1]`` fp32, what a stored key is divided by; ``v_scale`` alike. None: 1.
        tokens_per_program: None: by the number of tokens.
    """
    num_tokens, total_heads, dim = qkv.shape
    if num_tokens == 0:
        return
    tokens = tokens_per_program or (4 if num_tokens >= MANY_TOKENS else 1)
    _rotate_and_write[(triton.cdiv(num_tokens, tokens), triton.cdiv(total_heads, heads_per_program))](
        qkv,
        cos,
        sin,
        weight,
        keys,
        values,
        slots,
        k_scale,
        v_scale,
        eps,
        num_tokens,
        qkv.stride(0),
        HAS_NORM=weight is not None,
        HAS_FACTORS=k_scale is not None,
        NUM_HEADS=num_heads,
        KV_HEADS=keys.shape[1],
        PAGE=keys.shape[2],
        DIM=dim,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        HEADS=heads_per_program,
        TOKENS=tokens,
        num_warps=num_warps,
    )
