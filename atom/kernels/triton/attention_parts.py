"""What the attention kernels share: loading a tile of paged keys and values, a step of the online softmax, and adding
up what several programs made of shares of the keys.

Such programs leave their results in a workspace; the last of them to arrive adds all up in the shares' order, so that
results do not depend on timing. Arrivals are counted in int32s that are zero between launches: they are zeroed when
they are allocated, and the last one to arrive sets its counter back. Recording a launch counts nothing, and a launch
that fails ends its process's use of the device, so that no counter is left as it should not be.
"""

import triton
import triton.language as tl

# A maximum before any score: the lowest finite number of fp32. No score is lower, and no difference of two is NaN.
NEVER = tl.constexpr(-(2 - 2**-23) * 2.0**127)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def load_pages(
    keys,
    values,
    table,  # this sequence's block table
    token,  # [TILE] positions
    context_len,
    head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Keys and values at ``token``, each ``[TILE, DIM_PAD]``; zeros from ``context_len`` on."""
    dim = tl.arange(0, DIM_PAD)
    inside = token < context_len
    block = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
    row = (block * KV_HEADS + head) * PAGE * DIM + (token % PAGE) * DIM
    address = row[:, None] + dim[None, :]
    mask = inside[:, None] & (dim < DIM)[None, :]
    return tl.load(keys + address, mask=mask, other=0.0), tl.load(values + address, mask=mask, other=0.0)


@triton.jit
def take_tile(
    q,  # [M, DIM_PAD]
    best,  # [M] running maximum of scores * log2(e)
    total,  # [M] running sum of weights
    acc,  # [M, DIM_PAD] running weighted values
    k,  # [TILE, DIM_PAD] in q's dtype
    v,  # alike
    visible,  # [M, TILE] or broadcastable; read only where MASKED
    scale,
    soft_cap,
    weight_scale,  # what the values are multiplied by; read only where HAS_SCALES
    MASKED: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Take a tile of keys and values into the softmax."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_SOFT_CAP:
        score = soft_cap * _tanh(score * (scale / soft_cap)) * LOG2_E
        factor = 1.0
    else:
        factor = scale * LOG2_E  # positive: multiplied with the difference below, in one operation a score
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, 1) * factor)
    weight = tl.exp2(score * factor - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weight, 1)
    if HAS_SCALES:
        weight = weight * weight_scale
    acc = tl.dot(weight.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit
def arrive(
    best,  # [M] this program's share, as ``take_tile`` left it
    total,  # [M]
    acc,  # [M, DIM]
    partial,  # fp32, [rows, DIM]
    stats,  # fp32, [rows, 2]
    counter,  # of the programs that share keys
    row,  # [M] int64, where this share is left
    is_row,  # [M]
    num_shares,
    DIM: tl.constexpr,
):
    """Leave a share; whether it was the last of ``num_shares``, which finds all of them and the counter at zero."""
    dim = tl.arange(0, DIM)
    tl.store(partial + row[:, None] * DIM + dim[None, :], acc, mask=is_row[:, None])
    tl.store(stats + row * 2, best, mask=is_row)
    tl.store(stats + row * 2 + 1, total, mask=is_row)
    tl.debug_barrier()  # one thread counts: what all of them stored is released
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_shares - 1
    tl.debug_barrier()  # and what it acquired, all of them may load
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def add_shares(
    partial,
    stats,
    row,  # [M] int64, of the first share
    is_row,  # [M]
    num_shares,
    M: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,  # rows from a share to the next
    AHEAD: tl.constexpr,  # shares that are on their way together
):
    """Sum of the shares in their order: ``best [M]``, ``total [M]``, ``acc [M, DIM]``."""
    dim = tl.arange(0, DIM)
    best = tl.full((M,), NEVER, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DIM), tl.float32)
    shares = tl.where(is_row, num_shares, 0)
    for first in range(0, num_shares, AHEAD):
        peaks = ()
        sums = ()
        parts = ()
        for i in tl.static_range(AHEAD):
            place = row + (first + i) * STRIDE
            is_there = first + i < shares
            # Past the L1 cache, which may hold what another program stored there before.
            peaks = peaks + (tl.load(stats + place * 2, mask=is_there, other=NEVER, cache_modifier=".cg"),)
            sums = sums + (tl.load(stats + place * 2 + 1, mask=is_there, other=0.0, cache_modifier=".cg"),)
            address = partial + place[:, None] * DIM + dim[None, :]
            parts = parts + (tl.load(address, mask=is_there[:, None], other=0.0, cache_modifier=".cg"),)
        for i in tl.static_range(AHEAD):
            higher = tl.maximum(best, peaks[i])
            shrink = tl.exp2(best - higher)
            grow = tl.exp2(peaks[i] - higher)
            total = total * shrink + sums[i] * grow
            acc = acc * shrink[:, None] + parts[i] * grow[:, None]
            best = higher
    return best, total, acc
