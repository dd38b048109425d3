"""One token times a weight, with what stands before and behind it: norm, bias, activation, residual, arg-max.

A program loads its full rows, every column of them, before the first use. Weights ``[N, K]``; ``[gate | up]`` has
its pairs N / 2 rows apart.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.decode_parts import LOWEST, activate, pack_key


@triton.jit
def _sum_of_squares(x, ROWS: tl.constexpr):
    """The sum for each row of a tile: with whole rows in a warp, no pass through shared memory."""
    wide = tl.broadcast_to(x[None, :], (ROWS, x.shape[0]))
    return tl.sum(wide * wide, 1)


@triton.jit
def gemv(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    eps,
    N,  # rows of out
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """``out = residual + act(weight @ norm(x) + bias)`` for one token; with an activation, ROWS are pairs' halves.

    IS_FIRST lets no further kernel start before all that came before this one is complete.
    """
    CHUNKS: tl.constexpr = K // BK
    index = tl.arange(0, ROWS)
    if ACTIVATION:
        target = tl.program_id(0) * (ROWS // 2) + index // 2
        row = tl.minimum(target, N - 1) + (index % 2) * N
    else:
        target = tl.program_id(0) * ROWS + index
        row = tl.minimum(target, N - 1)
    column = tl.arange(0, BK)
    tiles = ()
    factors = ()
    for c in tl.static_range(CHUNKS):
        place = weight + row.to(tl.int64)[:, None] * K + (c * BK + column)[None, :]
        tiles = tiles + (tl.load(place, eviction_policy="evict_first"),)
    if HAS_NORM:
        for c in tl.static_range(CHUNKS):
            factors = factors + (tl.load(norm + c * BK + column),)
    if PDL:
        if not IS_FIRST:
            gdc_launch_dependents()
        gdc_wait()
        if IS_FIRST:
            gdc_launch_dependents()
    inputs = ()
    for c in tl.static_range(CHUNKS):
        inputs = inputs + (tl.load(x + c * BK + column).to(tl.float32),)
    squares = tl.zeros((ROWS,), tl.float32)
    if HAS_NORM:
        for c in tl.static_range(CHUNKS):
            squares += _sum_of_squares(inputs[c], ROWS)
    acc = tl.zeros((ROWS,), tl.float32)
    for c in tl.static_range(CHUNKS):
        value = inputs[c]
        if HAS_NORM:
            value = value * factors[c].to(tl.float32)
        wide = tiles[c].to(tl.float32)
        acc += tl.sum(wide * tl.broadcast_to(value[None, :], wide.shape), 1)
    if HAS_NORM:
        acc = acc * tl.rsqrt(squares / K + eps)
    if HAS_BIAS:
        acc += tl.load(bias + row).to(tl.float32)
    if ACTIVATION:
        gate, up = tl.split(tl.reshape(acc, (ROWS // 2, 2)))
        place = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        value = activate(gate, up, ACTIVATION)
    else:
        place = target
        value = acc
        if HAS_RESIDUAL:
            value += tl.load(residual + place, mask=place < N, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < N)


@triton.jit
def head_gemv(
    x,
    norm,
    weight,
    hidden,  # [K], written: x behind the final norm
    logits,  # [N], written if flags[0]
    keys,  # [1] int64, raised to the best of all programs
    flags,  # [2] int32: whether logits are wanted; how many ids may be chosen
    eps,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits of one token and their arg-max: a fixed grid loops over tiles of ROWS rows, one tile ahead."""
    CHUNKS: tl.constexpr = K // BK
    pid = tl.program_id(0)
    step = tl.num_programs(0)
    index = tl.arange(0, ROWS)
    column = tl.arange(0, BK)
    num_tiles = tl.cdiv(N, ROWS)
    row = tl.minimum(pid * ROWS + index, N - 1).to(tl.int64)
    tiles = ()
    factors = ()
    for c in tl.static_range(CHUNKS):
        place = weight + row[:, None] * K + (c * BK + column)[None, :]
        tiles = tiles + (tl.load(place, eviction_policy="evict_first"),)
    for c in tl.static_range(CHUNKS):
        factors = factors + (tl.load(norm + c * BK + column),)
    wants_logits = tl.load(flags)
    num_valid = tl.load(flags + 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inputs = ()
    squares = tl.zeros((ROWS,), tl.float32)
    for c in tl.static_range(CHUNKS):
        value = tl.load(x + c * BK + column).to(tl.float32)
        squares += _sum_of_squares(value, ROWS)
        inputs = inputs + (value * factors[c].to(tl.float32),)
    scale = tl.rsqrt(squares / K + eps)
    if pid == 0:
        factor = tl.max(scale, 0)  # all rows have the same
        for c in tl.static_range(CHUNKS):
            tl.store(hidden + c * BK + column, (inputs[c] * factor).to(hidden.dtype.element_ty))
    best = tl.full((ROWS,), LOWEST, tl.int64)
    for tile in range(pid, num_tiles, step):
        ahead = ()
        following = tile + step
        row = (following * ROWS + index).to(tl.int64)
        for c in tl.static_range(CHUNKS):
            place = weight + row[:, None] * K + (c * BK + column)[None, :]
            ahead = ahead + (
                tl.load(place, mask=(row < N)[:, None], other=0.0, eviction_policy="evict_first"),
            )
        acc = tl.zeros((ROWS,), tl.float32)
        for c in tl.static_range(CHUNKS):
            wide = tiles[c].to(tl.float32)
            acc += tl.sum(wide * tl.broadcast_to(inputs[c][None, :], wide.shape), 1)
        # Rounded as logits are, so that a row's id does not depend on whether somebody reads logits.
        logit = (acc * scale).to(logits.dtype.element_ty)
        token = tile * ROWS + index
        if wants_logits != 0:
            tl.store(logits + token, logit, mask=token < N)
        key = pack_key(logit.to(tl.float32), token)
        best = tl.maximum(best, tl.where(token < num_valid, key, LOWEST))
        tiles = ahead
    tl.atomic_max(keys, tl.max(best, 0))
