"""A few tokens times a weight, with what stands before and behind it: norm, bias, activation, residual, arg-max.

The weight is the tall operand of each product, the tokens are its columns, padded to 16, 32 or 64. How K is split
depends on (N, K) alone, never on the number of tokens; splits are added in their order by the one that ends last.

A norm before a product costs most where it is taken inside the loop, since its input then passes through registers.
The launch before can do half of it: store its result times the norm's weight, and for each of its tiles the tokens'
sums of squares over the tile, which the product's epilogue adds up.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.decode_parts import LOWEST, activate, pack_key, send_to_l2

_SHARES = tl.constexpr(64)  # of sums of squares, read at once


@triton.jit
def _weight_rows(pid, N, BN: tl.constexpr, ACTIVATION: tl.constexpr):
    """Rows of the weight in a tile: consecutive ones, or gate and up rows of consecutive outputs alternating."""
    index = tl.arange(0, BN)
    if ACTIVATION:
        row = tl.minimum(pid * (BN // 2) + index // 2, N - 1) + (index % 2) * N
    else:
        row = tl.minimum(pid * BN + index, N - 1)
    return row.to(tl.int64)


@triton.jit
def _finish(
    acc,  # [BN, BM] products
    squares,  # [BM] sums of squares of the tokens
    before,  # [BN, BM] residual
    row,
    pid,
    bias,
    out,
    next_norm,
    scaled_out,
    squares_out,
    eps,
    M,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """What comes behind the product, and the store; for the next norm also its input and shares of the squares."""
    token = tl.arange(0, BM)
    if HAS_NORM:
        acc = acc * tl.rsqrt(squares / K + eps)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    if ACTIVATION:
        pairs = tl.permute(tl.reshape(acc, (BN // 2, 2, BM)), (0, 2, 1))
        gate, up = tl.split(pairs)
        acc = activate(gate, up, ACTIVATION)
        place = pid * (BN // 2) + tl.arange(0, BN // 2)
    else:
        place = pid * BN + tl.arange(0, BN)
    offset = token[None, :] * N + place[:, None]
    mask = (token < M)[None, :] & (place < N)[:, None]
    if HAS_RESIDUAL:
        acc += before.to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + offset, result, mask=mask)
    if HAS_NEXT:
        wide = tl.where(mask, result.to(tl.float32), 0.0)
        factor = tl.load(next_norm + place, mask=place < N, other=0.0).to(tl.float32)
        tl.store(scaled_out + offset, (wide * factor[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(squares_out + pid * BM + token, tl.sum(wide * wide, 0))


@triton.jit
def _residual(
    residual,
    pid,
    M,
    N,
    BN: tl.constexpr,
    BM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """The residual of a tile, to be loaded while the product is still made; 0 where there is none."""
    before = 0.0
    if HAS_RESIDUAL:
        tl.static_assert(ACTIVATION == 0)
        token = tl.arange(0, BM)
        place = pid * BN + tl.arange(0, BN)
        mask = (token < M)[None, :] & (place < N)[:, None]
        before = tl.load(residual + token[None, :] * N + place[:, None], mask=mask, other=0.0)
    return before


@triton.jit
def _shares(squares_in, start, num_shares, BM: tl.constexpr):
    """``[_SHARES, BM]`` shares of the tokens' sums of squares that another launch left, from ``start`` on."""
    share = start + tl.arange(0, _SHARES)
    place = squares_in + share[:, None] * BM + tl.arange(0, BM)[None, :]
    return tl.load(place, mask=(share < num_shares)[:, None], other=0.0)


@triton.jit
def _all_squares(first, squares_in, num_shares, BM: tl.constexpr):
    """Sums of squares of the tokens; ``first`` shares were loaded before the product, to be there behind it."""
    for start in tl.range(_SHARES, num_shares, _SHARES, num_stages=1):
        first += _shares(squares_in, start, num_shares, BM)
    return tl.sum(first, 0)


@triton.jit
def _products(
    places,  # of the first tile of the weight
    inputs,  # of the first [BK, BM] of x
    norm,
    column,
    is_token,
    COLUMNS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TAKES_NORM: tl.constexpr,
):
    """Products over COLUMNS columns, and the sums of squares of x where the norm is taken here."""
    acc = tl.zeros((BN, BM), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for k in range(0, COLUMNS, BK):
        tile = tl.load(places)
        value = tl.load(inputs, mask=is_token, other=0.0)
        if TAKES_NORM:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            factor = tl.load(norm + k + column).to(tl.float32)
            value = (wide * factor[:, None]).to(tile.dtype)
        acc = tl.dot(tile, value, acc, input_precision="ieee")
        places += BK
        inputs += BK
    return acc, squares


@triton.jit(do_not_specialize=["M", "num_shares"])
def gemm_loop(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    squares_in,  # [num_shares, BM] fp32 of the launch that wrote x, if IS_SCALED
    next_norm,
    scaled_out,  # [M, N]: out times next_norm
    squares_out,  # [tiles, BM] fp32: shares of the sums of squares of out
    partial,  # [programs, BN + 1, BM] fp32
    arrivals,  # [tiles] int32, zero between launches
    eps,
    num_shares,
    M,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,  # columns of the weight sent to the L2 cache before the wait
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    IS_SCALED: tl.constexpr,  # x is scaled by the norm already; otherwise the norm is taken here
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """``out = residual + act(weight @ norm(x) + bias)`` for M tokens ``[M, K]`` -> ``[M, N]``."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    row = _weight_rows(pid, N, BN, ACTIVATION)
    token = tl.arange(0, BM)
    column = split * (K // SPLIT) + tl.arange(0, BK)
    if AHEAD > 0:
        line = split * (K // SPLIT) + tl.arange(0, AHEAD // 64) * 64
        send_to_l2(weight + row[:, None] * K + line[None, :])
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = weight + row[:, None] * K + column[None, :]
    inputs = x + token[None, :] * K + column[:, None]
    is_token = (token < M)[None, :]
    before = _residual(residual, pid, M, N, BN, BM, HAS_RESIDUAL, ACTIVATION)
    if IS_SCALED:
        shares = _shares(squares_in, 0, num_shares, BM)
    acc, squares = _products(
        places, inputs, norm, column, is_token, K // SPLIT, BN, BM, BK, HAS_NORM and not IS_SCALED
    )
    is_last = True
    if SPLIT > 1:
        index = tl.arange(0, BN)[:, None] * BM + token[None, :]
        base = partial + pid * SPLIT * (BN + 1) * BM
        tl.store(base + split * (BN + 1) * BM + index, acc)
        tl.store(base + split * (BN + 1) * BM + BN * BM + token, squares)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + pid, 1, sem="acq_rel") == SPLIT - 1
        tl.debug_barrier()
        if is_last:
            acc = tl.zeros((BN, BM), tl.float32)
            squares = tl.zeros((BM,), tl.float32)
            for i in tl.static_range(SPLIT):
                part = base + i * (BN + 1) * BM
                acc += tl.load(part + index, cache_modifier=".cg")
                squares += tl.load(part + BN * BM + token, cache_modifier=".cg")
            tl.store(arrivals + pid, 0)
    if IS_SCALED:
        squares = _all_squares(shares, squares_in, num_shares, BM)
    if is_last:
        _finish(
            acc, squares, before, row, pid, bias, out, next_norm, scaled_out, squares_out, eps, M, N, K, BN, BM,
            HAS_NORM, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, ACTIVATION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "num_shares"])
def gemm_rows(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    squares_in,  # [num_shares, BM] fp32 of the launch that wrote x, if IS_SCALED
    next_norm,
    scaled_out,  # [M, N]: out times next_norm
    squares_out,  # [tiles, BM] fp32: shares of the sums of squares of out
    eps,
    num_shares,
    M,
    N,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SLICES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    IS_SCALED: tl.constexpr,  # x is scaled by the norm already; otherwise the norm is taken here
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for small N * K: BN full rows are loaded before the wait, K is cut into slices, one a warp."""
    WIDTH: tl.constexpr = CHUNK // SLICES
    CHUNKS: tl.constexpr = K // CHUNK
    pid = tl.program_id(0)
    row = _weight_rows(pid, N, BN, ACTIVATION)
    token = tl.arange(0, BM)
    column = tl.arange(0, SLICES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tiles = ()
    for c in tl.static_range(CHUNKS):
        place = weight + row[None, :, None] * K + (c * CHUNK + column)[:, None, :]
        tiles = tiles + (tl.load(place, eviction_policy="evict_first"),)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before = _residual(residual, pid, M, N, BN, BM, HAS_RESIDUAL, ACTIVATION)
    acc = tl.zeros((SLICES, BM, BN), tl.float32)
    squares = tl.zeros((SLICES, BM), tl.float32)
    if IS_SCALED:
        shares = _shares(squares_in, 0, num_shares, BM)
    for c in tl.static_range(CHUNKS):
        place = x + token[None, :, None] * K + (c * CHUNK + column)[:, None, :]
        value = tl.load(place, mask=(token < M)[None, :, None], other=0.0)
        if HAS_NORM and not IS_SCALED:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 2)
            factor = tl.load(norm + c * CHUNK + column).to(tl.float32)
            value = (wide * factor[:, None, :]).to(value.dtype)
        acc = tl.dot(value, tl.permute(tiles[c], (0, 2, 1)), acc, input_precision="ieee")
    summed = tl.trans(tl.sum(acc, 0))
    total = tl.sum(squares, 0)
    if IS_SCALED:
        total = _all_squares(shares, squares_in, num_shares, BM)
    _finish(
        summed, total, before, row, pid, bias, out, next_norm, scaled_out, squares_out, eps, M, N, K, BN, BM,
        HAS_NORM, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def head_gemm(
    x,  # [M, K], behind the final norm
    weight,
    logits,  # [M, N], written if flags[0]
    keys,  # [M] int64, raised to the best of all programs
    flags,  # [2] int32: whether logits are wanted; how many ids may be chosen
    M,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits of M tokens and their arg-max."""
    pid = tl.program_id(0)
    row = _weight_rows(pid, N, BN, 0)
    token = tl.arange(0, BM)
    column = tl.arange(0, BK)
    if AHEAD > 0:
        send_to_l2(weight + row[:, None] * K + (tl.arange(0, AHEAD // 64) * 64)[None, :])
    wants_logits = tl.load(flags)
    num_valid = tl.load(flags + 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = weight + row[:, None] * K + column[None, :]
    inputs = x + token[None, :] * K + column[:, None]
    is_token = (token < M)[None, :]
    acc, _ = _products(places, inputs, None, column, is_token, K, BN, BM, BK, False)
    logit = acc.to(logits.dtype.element_ty)
    place = pid * BN + tl.arange(0, BN)
    if wants_logits != 0:
        offset = token.to(tl.int64)[None, :] * N + place[:, None]
        tl.store(logits + offset, logit, mask=is_token & (place < N)[:, None])
    key = pack_key(logit.to(tl.float32), tl.broadcast_to(place[:, None], (BN, BM)))
    key = tl.where((place < num_valid)[:, None], key, LOWEST)
    best = tl.max(key, 0)
    # Most programs cannot raise what others have reached by now: a stale view only costs an atomic.
    reached = tl.load(keys + token, mask=token < M, other=0, cache_modifier=".cg")
    tl.atomic_max(keys + token, best, mask=(token < M) & (best > reached))
