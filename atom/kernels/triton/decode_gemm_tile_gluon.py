"""The product for several tokens on sm_90 in Gluon, with weights and tokens brought to shared memory in bulk.

A program has BN rows of the weight and a share of K. Its weights are asked for before the wait for the launch before,
the tokens behind it, both by the copy engine, so that no value passes through registers on its way to the tensor
cores. The tokens are the rows of each product, always 64; those from BM on are whatever lies there and are not read.
Gate and up rows have sums of their own, so that a thread finds both of an output at the same place.

Programs begin at different steps of K: all read the same tokens, and would otherwise ask one part of the L2 cache for
them at a time. Where K is split, either the program of a tile that arrives last adds the sums of all, or they are a
cluster of programs that run at the same time: they leave their sums in the L2 cache, meet, and each ends its share of
the tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.gluon_parts import SHARES, activate, barrier, bring, load_shares

# Whether a barrier's type counts those of all programs of a cluster; Triton 3.6 has one of each, alike.
_COUNTS_ALL = gl.constexpr(hasattr(gl, "barrier"))
TOKENS = gl.constexpr(64)  # rows of a product of four warps


@gluon.constexpr_function
def _product_layout(rows, programs):
    levels = programs.bit_length() - 1
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16], [[0, 0]] * levels)


@gluon.constexpr_function
def _barrier_layout(programs, counts_all):
    levels = programs.bit_length() - 1
    return mbarrier.MBarrierLayout([[1 << i] if counts_all else [0] for i in range(levels)])


@gluon.constexpr_function
def _row_layout(rows, programs, has_shares):
    """Sixteen bytes of fp32 a thread; tokens shared out among the programs of a cluster, or all in each."""
    lanes = min(32, rows // 4)
    places = [[1 << i, 0] if has_shares else [0, 0] for i in range(programs.bit_length() - 1)]
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0], places)


@gluon.jit
def _rank(pid):
    """This program's number in its cluster."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r,r", [pid], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _store_of_each(place, value, mask):
    """As a usual store, which would leave to one program of a cluster what all seem to hold alike."""
    gl.inline_asm_elementwise(
        "{ .reg .pred there; setp.ne.s32 there, $12, 0;"
        "@there st.global.v4.f32 [$4], {$8, $9, $10, $11};"
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f,r,r,r,r",
        [place.to(gl.int64, bitcast=True), value, mask.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _meet(pid):
    """Wait for the programs of the cluster; what they wrote before is then seen."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;",
        "=r,r",
        [pid],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _bring_weights(
    weight, full, ring, stage, row, N, column, RBN: gl.constexpr, BK: gl.constexpr, PIECES: gl.constexpr
):
    """Have a stage filled with a program's rows from ``column`` on: as gate rows, then up rows if there are two."""
    mbarrier.expect(full.index(stage), PIECES * RBN * BK * 2)
    for piece in gl.static_range(PIECES):
        bring(weight, [piece * N + row, column], full.index(stage), ring.index(stage * PIECES + piece))


@gluon.jit
def _bring_tokens(x, full, ring, stage, column, BM: gl.constexpr, BK: gl.constexpr):
    mbarrier.expect(full.index(stage), BM * BK * 2)
    tile = ring.index(stage)
    bring(x, [0, column], full.index(stage), tile.slice(0, BM) if BM < TOKENS else tile)


@gluon.jit
def _rows_of(acc, BM: gl.constexpr, SUMS: gl.constexpr, LAYOUT: gl.constexpr):
    """The first BM rows of ``acc`` in another layout."""
    if BM < TOKENS:
        sums = gl.allocate_shared_memory(gl.float32, acc.shape, SUMS, acc)
        rows = sums.slice(0, BM).load(LAYOUT)
    else:
        rows = gl.convert_layout(acc, LAYOUT)
    return rows


@gluon.jit
def _add_parts(part, mask, SPLIT: gl.constexpr, STRIDE: gl.constexpr):
    """Partial sums of all splits, in their order."""
    total = gl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
    for other in gl.static_range(1, SPLIT):
        total += gl.load(part + other * STRIDE, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit(do_not_specialize=["M", "num_shares"])
def gemm_tile(
    x,  # descriptor: [M or more, K] by [BM, BK], times the norm's weight where there is a norm
    weight,  # descriptor: [rows, K] by [BN or BN / 2 with an activation, BK]
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
    CLUSTER: gl.constexpr,  # programs that meet: SPLIT, or 1; BM is TOKENS where they do
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
    PIECES: gl.constexpr = 2 if ACTIVATION else 1
    RBN: gl.constexpr = BN // PIECES
    MMA: gl.constexpr = _product_layout(RBN, CLUSTER)
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, max(1, 32 // RBN), min(4, RBN // 8), [1, 0])
    R: gl.constexpr = _row_layout(RBN, CLUSTER, True)
    EACH: gl.constexpr = _row_layout(RBN, CLUSTER, False)
    BARRIER: gl.constexpr = _barrier_layout(CLUSTER, _COUNTS_ALL)
    BARRIERS: gl.constexpr = CLUSTER if _COUNTS_ALL else 1
    dtype: gl.constexpr = weight.dtype

    pid = gl.program_id(0)
    split = _rank(pid) if CLUSTER > 1 else gl.program_id(1)
    first = split * (K // SPLIT)
    w_ring = gl.allocate_shared_memory(dtype, [W_STAGES * PIECES, RBN, BK], weight.layout)
    x_ring = gl.allocate_shared_memory(dtype, [X_STAGES, TOKENS, BK], x.layout)
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, BARRIERS], BARRIER)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, BARRIERS], BARRIER)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_full.index(i), count=1)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(W_STAGES):
        _bring_weights(
            weight, w_full, w_ring, i, pid * RBN, N, first + (pid + i) % STEPS * BK, RBN, BK, PIECES
        )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for i in gl.static_range(X_STAGES):
        _bring_tokens(x, x_full, x_ring, i, first + (pid + i) % STEPS * BK, BM, BK)

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
        shares = load_shares(squares_in, 0, num_shares, share, token, BM)

    acc = gl.zeros((TOKENS, RBN), gl.float32, layout=MMA)
    up_acc = acc
    for i in range(STEPS):
        mbarrier.wait(w_full.index(i % W_STAGES), i // W_STAGES & 1)
        mbarrier.wait(x_full.index(i % X_STAGES), i // X_STAGES & 1)
        tokens = x_ring.index(i % X_STAGES)
        tile = w_ring.index(i % W_STAGES * PIECES).permute((1, 0))
        product = warpgroup_mma(tokens, tile, acc, is_async=True)
        if ACTIVATION:
            up_tile = w_ring.index(i % W_STAGES * PIECES + 1).permute((1, 0))
            up_product = warpgroup_mma(tokens, up_tile, up_acc, is_async=True)
            acc, up_acc = warpgroup_mma_wait(2, deps=[product, up_product])
        else:
            acc = warpgroup_mma_wait(1, deps=[product])
        if W_STAGES < STEPS or X_STAGES < STEPS:
            # The step before has ended: its stages are free once all warps are here.
            barrier()
            done = i - 1
            if W_STAGES < STEPS:  # noqa: SIM102 - decided while it is compiled
                if (done >= 0) & (done + W_STAGES < STEPS):
                    column = first + (pid + done + W_STAGES) % STEPS * BK
                    _bring_weights(
                        weight, w_full, w_ring, done % W_STAGES, pid * RBN, N, column, RBN, BK, PIECES
                    )
            if X_STAGES < STEPS:  # noqa: SIM102
                if (done >= 0) & (done + X_STAGES < STEPS):
                    column = first + (pid + done + X_STAGES) % STEPS * BK
                    _bring_tokens(x, x_full, x_ring, done % X_STAGES, column, BM, BK)
    if ACTIVATION:
        acc, up_acc = warpgroup_mma_wait(0, deps=[acc, up_acc])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()  # sums pass through shared memory that products of other warps may still read
    parts = partial + pid * SPLIT * BN * BM
    own = parts + split * BN * BM
    spot = token[:, None] * RBN + inner[None, :]
    if CLUSTER > 1:
        own_token = gl.arange(0, BM, layout=gl.SliceLayout(1, EACH))[:, None]
        own_inner = gl.arange(0, RBN, layout=gl.SliceLayout(0, EACH))[None, :]
        own += own_token * RBN + own_inner
        is_own = (own_token < M) & (own_inner >= 0)
        _store_of_each(own, _rows_of(acc, BM, SUMS, EACH), is_own)
        if ACTIVATION:
            _store_of_each(own + RBN * BM, _rows_of(up_acc, BM, SUMS, EACH), is_own)
    else:
        total = _rows_of(acc, BM, SUMS, R)
        if ACTIVATION:
            up = _rows_of(up_acc, BM, SUMS, R)
    if HAS_NORM:
        for start in range(SHARES, num_shares, SHARES):
            shares += load_shares(squares_in, start, num_shares, share, token, BM)
        factor = gl.rsqrt(gl.sum(shares, 1) / K + eps)[:, None]
    is_last = True
    if CLUSTER > 1:
        _meet(pid)
    elif SPLIT > 1:
        gl.store(own + spot, total, mask=is_token)
        if ACTIVATION:
            gl.store(own + RBN * BM + spot, up, mask=is_token)
        barrier()
        is_last = gl.atomic_add(arrivals + pid, 1, sem="acq_rel") == SPLIT - 1
        barrier()
    if is_last:
        if SPLIT > 1:
            total = _add_parts(parts + spot, is_token, SPLIT, BN * BM)
            if ACTIVATION:
                up = _add_parts(parts + RBN * BM + spot, is_token, SPLIT, BN * BM)
            if CLUSTER == 1:
                gl.store(arrivals + pid, 0)
        if HAS_NORM:
            total = total * factor
        if HAS_BIAS:
            total += gl.load(bias + place).to(gl.float32)[None, :]
        if ACTIVATION:
            if HAS_NORM:
                up = up * factor
            if HAS_BIAS:
                up += gl.load(bias + N + place).to(gl.float32)[None, :]
            total = activate(total, up, ACTIVATION)
        if HAS_RESIDUAL:
            total += before
        narrow = total.to(out.dtype.element_ty)
        gl.store(out + offset, narrow, mask=is_token)
        if HAS_NEXT:
            wide = gl.where(is_token, narrow.to(gl.float32), 0.0)
            scaled = (wide * next_factor[None, :]).to(out.dtype.element_ty)
            gl.store(scaled_out + offset, scaled, mask=is_token)
            gl.store(squares_out + pid * BM + token, gl.sum(wide * wide, 1))
