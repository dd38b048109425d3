"""The product for a few tokens on sm_90 in Gluon: weights are on their way to shared memory before the wait.

A program has BN rows of the weight, K is cut into slices that its warps own, and a warp multiplies its slice for all
tokens. What the ring of stages holds is asked for before the wait for the launch before; x then goes from the L2 cache
straight to the registers of the tensor cores, each value once a program, with no shared memory between. A thread
takes eight neighbouring columns of x and of the weight for four steps of the tensor cores, in another order than
theirs, which a sum over columns does not notice.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.gluon_parts import SHARES, activate, barrier, copy, load_shares


@gluon.jit
def _inputs(
    x, norm, step, column, token, M, squares, K: gl.constexpr, BK: gl.constexpr, TAKES_NORM: gl.constexpr
):
    """x of one step as the tensor cores take it, times the norm, and the sums of squares so far."""
    value = gl.load(x + token * K + (step * BK + column), mask=token < M, other=0.0)
    if TAKES_NORM:
        wide = value.to(gl.float32)
        squares += gl.sum(wide * wide, 2)
        factor = gl.load(norm + (step * BK + column)).to(gl.float32)
        value = (wide * factor).to(value.dtype)
    return value, squares


@gluon.jit(do_not_specialize=["M", "num_shares"])
def gemm_ring(
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
    N,  # rows of out; a multiple of the program's
    K: gl.constexpr,
    BN: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    SLICES: gl.constexpr,  # warps along K; the others are along the rows
    NW: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_NEXT: gl.constexpr,
    IS_SCALED: gl.constexpr,  # x is scaled by the norm already; otherwise the norm is taken here
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """As ``decode_gemm.gemm_loop``."""
    WIDTH: gl.constexpr = BK // SLICES
    STEPS: gl.constexpr = K // SPLIT // BK
    HELD: gl.constexpr = STEPS if STEPS <= STAGES else STAGES - 1  # stages asked for before the wait
    RW: gl.constexpr = NW // SLICES
    TAKES_NORM: gl.constexpr = HAS_NORM and not IS_SCALED
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, 1, RW], [1, 16, 8])
    XL: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    WL: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    LANES: gl.constexpr = min(32, WIDTH // 8)
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [SLICES, RW, 1], [2, 1, 0])
    RING: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2 if WIDTH >= 64 else 1, [2, 1, 0])
    # Sums leave the tensor cores through shared memory, where each thread finds all slices of its results.
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, max(1, 32 // BN), min(4, BN // 8), [2, 1, 0])
    EV: gl.constexpr = 2 if BN < 32 else 4
    EL: gl.constexpr = min(32, BN // EV)
    E: gl.constexpr = gl.BlockedLayout([1, EV], [32 // EL, EL], [NW, 1], [1, 0])
    E3: gl.constexpr = gl.BlockedLayout([1, 1, EV], [1, 32 // EL, EL], [1, NW, 1], [2, 1, 0])
    RBN: gl.constexpr = BN // 2 if ACTIVATION else BN
    RV: gl.constexpr = EV // 2 if ACTIVATION else EV
    R: gl.constexpr = gl.BlockedLayout([1, RV], [32 // EL, EL], [NW, 1], [1, 0])

    pid = gl.program_id(0)
    split = gl.program_id(1)
    first = split * (K // SPLIT)
    # Rows of the weight: consecutive ones, or gate and up rows of consecutive outputs alternating.
    index = gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    if ACTIVATION:
        row = pid * RBN + index // 2 + (index % 2) * N
    else:
        row = pid * BN + index
    slice_ = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    inner = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    line = gl.expand_dims(gl.expand_dims(row.to(gl.int64), 0), 2) * K
    start = gl.expand_dims(gl.expand_dims(slice_, 1), 2) * WIDTH + gl.expand_dims(gl.expand_dims(inner, 0), 1)
    places = weight + line + (first + start)
    ring = gl.allocate_shared_memory(weight.dtype.element_ty, [STAGES, SLICES, BN, WIDTH], RING)
    for i in gl.static_range(HELD):
        copy(ring.index(i), places + i * BK)
        async_copy.commit_group()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    x_slice = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, XL)))
    x_inner = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, XL)))
    x_token = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(2, XL)))
    column = gl.expand_dims(gl.expand_dims(x_slice, 1), 2) * WIDTH
    column = first + column + gl.expand_dims(gl.expand_dims(x_inner, 0), 1)
    x_token = gl.expand_dims(gl.expand_dims(x_token, 0), 2)
    squares = gl.zeros((SLICES, BM), gl.float32, layout=gl.SliceLayout(2, XL))
    acc = gl.zeros((SLICES, BM, BN), gl.float32, layout=MMA)
    value, squares = _inputs(x, norm, 0, column, x_token, M, squares, K, BK, TAKES_NORM)

    token = gl.arange(0, BM, layout=gl.SliceLayout(1, R))
    place = pid * RBN + gl.arange(0, RBN, layout=gl.SliceLayout(0, R))
    offset = token[:, None] * N + place[None, :]
    is_token = (token < M)[:, None]
    if HAS_RESIDUAL:
        before = gl.load(residual + offset, mask=is_token, other=0.0).to(gl.float32)
    if HAS_NEXT:
        next_factor = gl.load(next_norm + place).to(gl.float32)
    e_token = gl.arange(0, BM, layout=gl.SliceLayout(1, E))
    if HAS_NORM and IS_SCALED:
        share = gl.arange(0, SHARES, layout=gl.SliceLayout(0, E))
        first_shares = load_shares(squares_in, 0, num_shares, share, e_token, BM)

    if STEPS <= STAGES and STEPS * BM <= 128:
        for i in gl.static_range(STEPS):
            if i + 1 < STEPS:
                following, squares = _inputs(x, norm, i + 1, column, x_token, M, squares, K, BK, TAKES_NORM)
            async_copy.wait_group(STEPS - 1 - i)
            acc = mma_v2(value, ring.index(i).permute((0, 2, 1)).load(WL), acc)
            if i + 1 < STEPS:
                value = following
    else:
        for i in range(STEPS):
            following, squares = _inputs(
                x, norm, gl.minimum(i + 1, STEPS - 1), column, x_token, gl.where(i + 1 < STEPS, M, 0), squares,
                K, BK, TAKES_NORM,
            )  # fmt: skip
            async_copy.wait_group(HELD - 1)
            if STAGES < STEPS and i + HELD < STEPS:
                copy(ring.index((i + HELD) % STAGES), places + (i + HELD) * BK)
            async_copy.commit_group()
            acc = mma_v2(value, ring.index(i % STAGES).permute((0, 2, 1)).load(WL), acc)
            value = following

    sums = gl.allocate_shared_memory(gl.float32, [SLICES, BM, BN], SUMS, acc)
    total = gl.convert_layout(gl.sum(sums.load(E3), 0), E)
    if HAS_NORM and IS_SCALED:
        shares = first_shares
        for start_share in range(SHARES, num_shares, SHARES):
            shares += load_shares(squares_in, start_share, num_shares, share, e_token, BM)
        total_squares = gl.sum(shares, 1)
    if TAKES_NORM:
        total_squares = gl.convert_layout(gl.sum(squares, 0), gl.SliceLayout(1, E))
    is_last = True
    if SPLIT > 1:
        spot = e_token[:, None] * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, E))[None, :]
        base = partial + pid * SPLIT * (BN + 1) * BM
        own = base + split * (BN + 1) * BM
        gl.store(own + spot, total)
        if TAKES_NORM:
            gl.store(own + BN * BM + e_token, total_squares)
        barrier()
        is_last = gl.atomic_add(arrivals + pid, 1, sem="acq_rel") == SPLIT - 1
        barrier()
        if is_last:
            total = gl.zeros((BM, BN), gl.float32, layout=E)
            for other in gl.static_range(SPLIT):
                total += gl.load(base + other * (BN + 1) * BM + spot, cache_modifier=".cg")
            if TAKES_NORM:
                total_squares = gl.zeros((BM,), gl.float32, layout=gl.SliceLayout(1, E))
                for other in gl.static_range(SPLIT):
                    total_squares += gl.load(
                        base + other * (BN + 1) * BM + BN * BM + e_token, cache_modifier=".cg"
                    )
            gl.store(arrivals + pid, 0)
    if is_last:
        if HAS_NORM:
            total = total * gl.rsqrt(total_squares / K + eps)[:, None]
        if HAS_BIAS:
            b_index = gl.arange(0, BN, layout=gl.SliceLayout(0, E))
            if ACTIVATION:
                b_row = pid * RBN + b_index // 2 + (b_index % 2) * N
            else:
                b_row = pid * BN + b_index
            total += gl.load(bias + b_row).to(gl.float32)[None, :]
        if ACTIVATION:
            gate, up = gl.split(gl.reshape(total, (BM, RBN, 2)))
            result = gl.convert_layout(activate(gate, up, ACTIVATION), R)
        else:
            result = total
        if HAS_RESIDUAL:
            result += before
        narrow = result.to(out.dtype.element_ty)
        gl.store(out + offset, narrow, mask=is_token)
        if HAS_NEXT:
            wide = gl.where(is_token, narrow.to(gl.float32), 0.0)
            gl.store(
                scaled_out + offset, (wide * next_factor[None, :]).to(out.dtype.element_ty), mask=is_token
            )
            gl.store(squares_out + pid * BM + token, gl.sum(wide * wide, 1))
