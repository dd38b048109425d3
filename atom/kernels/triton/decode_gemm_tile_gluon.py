"""The product for several tokens on sm_90 in Gluon, with weights and tokens brought to shared memory in bulk.

A program has BN rows of the weight and a share of K. Its weights are asked for before the wait for the launch before,
the tokens behind it, both by the copy engine, so that no value passes through registers on its way to the tensor
cores. The tokens are the rows of each product, always 64; those beyond BM are whatever lies there and are not read.
Gate rows of a program lie above its up rows, so that a thread finds both of an output at the same place.

Programs begin at different steps of K: all read the same tokens, and would otherwise ask one part of the L2 cache for
them at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton 3.6 has the latter.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_bring = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
TOKENS = gl.constexpr(64)  # rows of a product of four warps
SHARES = gl.constexpr(64)  # of sums of squares, read at once


@gluon.jit
def _activate(gate, up, ACTIVATION: gl.constexpr):
    """As ``decode_parts.activate``."""
    if ACTIVATION == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        value = gate * (1.0 - 1.0 / (gl.exp2(inner * 2.8853900817779268) + 1.0)) * up
    else:
        value = gate / (1.0 + gl.exp2(gate * -1.4426950408889634)) * up
    return value


@gluon.jit
def _bring_weights(
    weight, bar, tile, row, N, column, RBN: gl.constexpr, BK: gl.constexpr, ACTIVATION: gl.constexpr
):
    """Have ``tile`` filled with a program's rows from ``column`` on; gate rows, then up rows."""
    if ACTIVATION:
        mbarrier.expect(bar, 2 * RBN * BK * 2)
        _bring(weight, [row, column], bar, tile.slice(0, RBN))
        _bring(weight, [N + row, column], bar, tile.slice(RBN, RBN))
    else:
        mbarrier.expect(bar, RBN * BK * 2)
        _bring(weight, [row, column], bar, tile)


@gluon.jit
def _bring_tokens(x, bar, tile, column, BM: gl.constexpr, BK: gl.constexpr):
    mbarrier.expect(bar, BM * BK * 2)
    if BM < TOKENS:
        _bring(x, [0, column], bar, tile.slice(0, BM))
    else:
        _bring(x, [0, column], bar, tile)


@gluon.jit
def _shares(squares_in, start, num_shares, share, token, BM: gl.constexpr):
    """``[BM, SHARES]`` shares of sums of squares, from the given one on."""
    place = squares_in + (start + share)[None, :] * BM + token[:, None]
    return gl.load(place, mask=(start + share < num_shares)[None, :], other=0.0)


@gluon.jit
def _add_parts(part, SPLIT: gl.constexpr, STRIDE: gl.constexpr):
    """Partial sums of all splits, in their order."""
    total = gl.load(part, cache_modifier=".cg")
    for other in gl.static_range(1, SPLIT):
        total += gl.load(part + other * STRIDE, cache_modifier=".cg")
    return total


@gluon.jit(do_not_specialize=["M", "num_shares"])
def gemm_tile(
    x,  # descriptor: [M, K] by [BM, BK], times the norm's weight where there is a norm
    weight,  # descriptor: [rows, K] by [RBN, BK]
    bias,
    residual,
    out,
    squares_in,  # [num_shares, BM] fp32 of the launch that wrote x, if HAS_NORM
    next_norm,
    scaled_out,  # [M, N]: out times next_norm
    squares_out,  # [tiles, BM] fp32: shares of the sums of squares of out
    partial,  # [tiles, SPLIT, BN * BM] fp32
    arrivals,  # [tiles] int32, zero between launches
    eps,
    num_shares,
    M,
    N,  # columns of out; a multiple of the program's
    K: gl.constexpr,
    BN: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    SPLIT: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_NEXT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """As ``decode_gemm.gemm_loop`` where the launch before left half of the norm."""
    STEPS: gl.constexpr = K // SPLIT // BK
    RBN: gl.constexpr = BN // 2 if ACTIVATION else BN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, max(1, 32 // BN), min(4, BN // 8), [1, 0])
    LANES: gl.constexpr = min(32, RBN // 4)
    R: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = weight.dtype

    pid = gl.program_id(0)
    split = gl.program_id(1)
    first = split * (K // SPLIT)
    w_ring = gl.allocate_shared_memory(dtype, [W_STAGES, BN, BK], weight.layout)
    x_ring = gl.allocate_shared_memory(dtype, [X_STAGES, TOKENS, BK], x.layout)
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], BARRIER)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], BARRIER)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_full.index(i), count=1)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
    fence_async_shared()
    _barrier()
    for i in gl.static_range(W_STAGES):
        column = first + (pid + i) % STEPS * BK
        _bring_weights(weight, w_full.index(i), w_ring.index(i), pid * RBN, N, column, RBN, BK, ACTIVATION)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for i in gl.static_range(X_STAGES):
        _bring_tokens(x, x_full.index(i), x_ring.index(i), first + (pid + i) % STEPS * BK, BM, BK)

    token = gl.arange(0, BM, layout=gl.SliceLayout(1, R))
    inner = gl.arange(0, RBN, layout=gl.SliceLayout(0, R))
    place = pid * RBN + inner
    offset = token[:, None] * N + place[None, :]
    is_token = (token < M)[:, None]
    if HAS_RESIDUAL:
        before = gl.load(residual + offset, mask=is_token, other=0.0).to(gl.float32)
    if HAS_NEXT:
        next_factor = gl.load(next_norm + place).to(gl.float32)
    if HAS_NORM:
        share = gl.arange(0, SHARES, layout=gl.SliceLayout(0, R))
        shares = _shares(squares_in, 0, num_shares, share, token, BM)

    acc = gl.zeros((TOKENS, BN), gl.float32, layout=MMA)
    for i in range(STEPS):
        mbarrier.wait(w_full.index(i % W_STAGES), i // W_STAGES & 1)
        mbarrier.wait(x_full.index(i % X_STAGES), i // X_STAGES & 1)
        tile = w_ring.index(i % W_STAGES).permute((1, 0))
        product = warpgroup_mma(x_ring.index(i % X_STAGES), tile, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[product])
        if W_STAGES < STEPS or X_STAGES < STEPS:
            # The step before has ended: its stages are free once all warps are here.
            _barrier()
            done = i - 1
            if W_STAGES < STEPS:  # noqa: SIM102 - decided while it is compiled
                if (done >= 0) & (done + W_STAGES < STEPS):
                    _bring_weights(
                        weight, w_full.index(done % W_STAGES), w_ring.index(done % W_STAGES), pid * RBN, N,
                        first + (pid + done + W_STAGES) % STEPS * BK, RBN, BK, ACTIVATION,
                    )  # fmt: skip
            if X_STAGES < STEPS:  # noqa: SIM102
                if (done >= 0) & (done + X_STAGES < STEPS):
                    _bring_tokens(
                        x, x_full.index(done % X_STAGES), x_ring.index(done % X_STAGES),
                        first + (pid + done + X_STAGES) % STEPS * BK, BM, BK,
                    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    _barrier()
    sums = gl.allocate_shared_memory(gl.float32, [TOKENS, BN], SUMS, acc)
    total = sums.slice(0, BM).slice(0, RBN, dim=1).load(R)
    if ACTIVATION:
        up = sums.slice(0, BM).slice(RBN, RBN, dim=1).load(R)
    if HAS_NORM:
        for start in range(SHARES, num_shares, SHARES):
            shares += _shares(squares_in, start, num_shares, share, token, BM)
        factor = gl.rsqrt(gl.sum(shares, 1) / K + eps)[:, None]
    is_last = True
    if SPLIT > 1:
        base = partial + pid * SPLIT * BN * BM + token[:, None] * RBN + inner[None, :]
        gl.store(base + split * BN * BM, total)
        if ACTIVATION:
            gl.store(base + split * BN * BM + RBN * BM, up)
        _barrier()
        is_last = gl.atomic_add(arrivals + pid, 1, sem="acq_rel") == SPLIT - 1
        _barrier()
        if is_last:
            total = _add_parts(base, SPLIT, BN * BM)
            if ACTIVATION:
                up = _add_parts(base + RBN * BM, SPLIT, BN * BM)
            gl.store(arrivals + pid, 0)
    if is_last:
        if HAS_NORM:
            total = total * factor
        if HAS_BIAS:
            total += gl.load(bias + place).to(gl.float32)[None, :]
        if ACTIVATION:
            if HAS_NORM:
                up = up * factor
            if HAS_BIAS:
                up += gl.load(bias + N + place).to(gl.float32)[None, :]
            total = _activate(total, up, ACTIVATION)
        if HAS_RESIDUAL:
            total += before
        narrow = total.to(out.dtype.element_ty)
        gl.store(out + offset, narrow, mask=is_token)
        if HAS_NEXT:
            wide = gl.where(is_token, narrow.to(gl.float32), 0.0)
            scaled = (wide * next_factor[None, :]).to(out.dtype.element_ty)
            gl.store(scaled_out + offset, scaled, mask=is_token)
            gl.store(squares_out + pid * BM + token, gl.sum(wide * wide, 1))
