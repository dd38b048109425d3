"""What the attention kernels share: one step of the online softmax over a tile of paged keys."""

import triton
import triton.language as tl

NEVER = tl.constexpr(-1.0e30)  # a maximum before any score: finite, so that no difference of two is NaN
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def add_tile(
    q,  # [M, DIM_PAD]
    best,  # [M] running maximum of scores * log2(e)
    total,  # [M] running sum of weights
    acc,  # [M, DIM_PAD] running weighted values
    token,  # [TILE] positions of the keys
    visible,  # [M, TILE] or [1, TILE]
    table,  # this sequence's block table
    keys,
    values,
    head,
    scale,
    soft_cap,
    context_len,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Take the keys at ``token`` into the softmax."""
    dim = tl.arange(0, DIM_PAD)
    inside = token < context_len
    block = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
    row = (block * KV_HEADS + head) * PAGE * DIM + (token % PAGE) * DIM
    k = tl.load(keys + row[None, :] + dim[:, None], mask=inside[None, :] & (dim < DIM)[:, None], other=0.0)
    v = tl.load(values + row[:, None] + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
    score = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if HAS_SOFT_CAP:
        score = soft_cap * _tanh(score / soft_cap)
    score = tl.where(visible, score * LOG2_E, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp2(score - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weight, 1)
    acc = acc * shrink[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return new_best, total, acc
