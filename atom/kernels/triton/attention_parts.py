"""What the attention kernels share: loading a tile of paged keys and values, and a step of the online softmax."""

import triton
import triton.language as tl

NEVER = tl.constexpr(-1.0e30)  # a maximum before any score: finite, so that no difference of two is NaN
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
