"""Storing a step's keys and values in the paged cache."""

import torch
import triton
import triton.language as tl


@triton.jit
def finite(x):
    """x, and 0 where it is not finite: ``x - x`` is 0 for finite numbers and NaN for the others."""
    return tl.where(x - x == 0.0, x, 0.0)


@triton.jit
def stored(x, kind: tl.constexpr):
    """x as a cache of ``kind`` holds it: what is too large for fp8, and would be NaN, is its largest number."""
    if kind == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    elif kind == tl.float8e4b8:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -240.0), 240.0)
    elif kind == tl.float8e5 or kind == tl.float8e5b16:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -57344.0), 57344.0)
    return x.to(kind)


@triton.jit
def _write_kv(
    k,
    v,
    keys,
    values,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    NUM_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    mask = (head < NUM_HEADS) & (dim < DIM)
    k_source = k + token * k_token + head * k_head + dim
    v_source = v + token * v_token + head * v_head + dim
    new_key = tl.load(k_source, mask=mask, other=0.0)
    new_value = tl.load(v_source, mask=mask, other=0.0)
    # Attention reads this step's keys and values where they are: padding too, as what it then masks.
    tl.store(k_source, tl.zeros_like(new_key), mask=mask & (new_key - new_key != 0.0))
    tl.store(v_source, tl.zeros_like(new_value), mask=mask & (new_value - new_value != 0.0))
    if slot >= 0:
        target = ((slot // PAGE) * NUM_HEADS + head) * PAGE * DIM + (slot % PAGE) * DIM + dim
        tl.store(keys + target, stored(finite(new_key), keys.dtype.element_ty), mask=mask)
        tl.store(values + target, stored(finite(new_value), values.dtype.element_ty), mask=mask)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store ``k`` and ``v`` at ``slots``; a value that is not finite becomes 0, in the cache and where it is.

    Args:
        k: ``[num_tokens, num_kv_heads, head_dim]``, the last dimension contiguous; ``v`` alike.
        keys: ``[num_blocks, num_kv_heads, block_size, head_dim]``, contiguous, written; ``values`` alike. Their
            own type may be an fp8, whose largest number stands for all beyond it.
        slots: ``[num_tokens]`` int64; a token with slot -1 is not stored.
    """
    num_tokens, num_heads, dim = k.shape
    if num_tokens == 0:
        return
    _write_kv[(num_tokens,)](
        k,
        v,
        keys,
        values,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        PAGE=keys.shape[2],
        DIM=dim,
        HEADS_PAD=triton.next_power_of_2(num_heads),
        DIM_PAD=triton.next_power_of_2(dim),
        num_warps=4 if num_heads * dim >= 1024 else 1,
    )
