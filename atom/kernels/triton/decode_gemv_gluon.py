"""The one-token product for sm_90 in Gluon, in two forms.

``gemv_rows``: a warp owns whole rows and reads x in its own layout, no shared memory. Behind the wait it has some 500
instructions for 64 registers of weights.

``gemv_mma``: tensor cores take a warp's share of the columns of 8 or 16 rows, and warps meet for their sums. Behind
the wait it has 200 instructions, which counts where little is left to read by then: in small layers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.gluon_parts import activate


@gluon.jit
def gemv_rows(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    eps,
    N,  # rows of out; a multiple of the program's
    K: gl.constexpr,
    RPW: gl.constexpr,
    BK: gl.constexpr,
    NW: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
    IS_FIRST: gl.constexpr,
):
    """As ``decode_gemv.gemv``, with RPW rows of ``out`` a warp."""
    CHUNKS: gl.constexpr = K // BK
    R: gl.constexpr = RPW * NW
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [NW, 1], [1, 0])
    row = gl.program_id(0) * R + gl.arange(0, R, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    place = weight + (row * K)[:, None] + column[None, :]
    tiles = ()
    ups = ()
    factors = ()
    for c in gl.static_range(CHUNKS):
        tiles = tiles + (gl.load(place + c * BK, eviction_policy="evict_first"),)
        if ACTIVATION:
            ups = ups + (gl.load(place + (N * K + c * BK), eviction_policy="evict_first"),)
    if HAS_NORM:
        for c in gl.static_range(CHUNKS):
            factors = factors + (gl.load(norm + c * BK + column),)
    if PDL:
        if not IS_FIRST:
            gdc_launch_dependents()
        gdc_wait()
        if IS_FIRST:
            gdc_launch_dependents()
    if HAS_RESIDUAL:
        before = gl.load(residual + row).to(gl.float32)
    inputs = ()
    for c in gl.static_range(CHUNKS):
        inputs = inputs + (gl.load(x + c * BK + column).to(gl.float32),)
    squares = 0.0
    acc = gl.zeros((R,), gl.float32, layout=gl.SliceLayout(1, L))
    up = gl.zeros((R,), gl.float32, layout=gl.SliceLayout(1, L))
    for c in gl.static_range(CHUNKS):
        value = inputs[c]
        if HAS_NORM:
            squares += gl.sum(value * value, 0)
            value = value * factors[c].to(gl.float32)
        acc += gl.sum(tiles[c].to(gl.float32) * value[None, :], 1)
        if ACTIVATION:
            up += gl.sum(ups[c].to(gl.float32) * value[None, :], 1)
    if HAS_NORM:
        scale = gl.rsqrt(squares / K + eps)
        acc = acc * scale
        up = up * scale
    if HAS_BIAS:
        acc += gl.load(bias + row).to(gl.float32)
        if ACTIVATION:
            up += gl.load(bias + N + row).to(gl.float32)
    if ACTIVATION:
        acc = activate(acc, up, ACTIVATION)
    if HAS_RESIDUAL:
        acc += before
    gl.store(out + row, acc.to(out.dtype.element_ty))


@gluon.jit
def gemv_mma(
    x,
    norm,
    weight,
    bias,
    residual,
    out,
    eps,
    N,  # rows of out; a multiple of the program's
    K: gl.constexpr,
    ROWS: gl.constexpr,  # of the weight, a program's: 8 or 16
    NW: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
    IS_FIRST: gl.constexpr,
):
    """As ``decode_gemv.gemv``, with x times the norm's weight rounded to the weight's dtype, as a module has it."""
    BK: gl.constexpr = 64
    SHARE: gl.constexpr = K // NW  # columns of a warp
    CHUNKS: gl.constexpr = SHARE // BK
    OUTS: gl.constexpr = ROWS // 2 if ACTIVATION else ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)  # a thread has 8 columns of a row at once
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    WIDE: gl.constexpr = min(256, SHARE & -SHARE)  # columns of a warp that are scaled at a time
    PIECE: gl.constexpr = gl.BlockedLayout([1, WIDE // 32], [1, 32], [NW, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [NW, 1], [0, 1])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    dtype: gl.constexpr = weight.dtype.element_ty
    first = gl.program_id(0) * OUTS
    tiles = ()
    if ROWS == 16:
        ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LEFT))
        index = gl.arange(0, 16, layout=ROW)
        row = first + index
        if ACTIVATION:
            row = first + index % 8 + index // 8 * N
        warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
        column = gl.arange(0, BK, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
        place = weight + (row * K)[None, :, None] + (warp * SHARE)[:, None, None] + column[None, None, :]
    else:
        row = first + gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))
        warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
        column = gl.arange(0, BK, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
        place = weight + (row * K)[None, None, :] + (warp * SHARE)[:, None, None] + column[None, :, None]
    for c in gl.static_range(CHUNKS):
        tiles = tiles + (gl.load(place + c * BK, eviction_policy="evict_first"),)
    if HAS_NORM:
        of_warp = gl.arange(0, NW, layout=gl.SliceLayout(1, PIECE))[:, None] * SHARE
        piece = of_warp + gl.arange(0, WIDE, layout=gl.SliceLayout(0, PIECE))[None, :]
        factors = ()
        for c in gl.static_range(SHARE // WIDE):
            factors = factors + (gl.load(norm + c * WIDE + piece),)
    if PDL:
        if not IS_FIRST:
            gdc_launch_dependents()
        gdc_wait()
        if IS_FIRST:
            gdc_launch_dependents()
    target = first + gl.arange(0, OUTS, layout=gl.SliceLayout(1, LINES))
    if HAS_RESIDUAL:
        before = gl.load(residual + target).to(gl.float32)
    # What of x a thread multiplies: the same for all rows.
    GIVEN: gl.constexpr = gl.SliceLayout(2, RIGHT) if ROWS == 16 else gl.SliceLayout(1, LEFT)
    given = ()
    if HAS_NORM:
        values = ()
        for c in gl.static_range(SHARE // WIDE):
            values = values + (gl.load(x + c * WIDE + piece).to(gl.float32),)
        scaled = gl.allocate_shared_memory(dtype, [SHARE // WIDE, NW, WIDE], PLAIN)
        squares = gl.zeros([NW, WIDE], gl.float32, PIECE)
        for c in gl.static_range(SHARE // WIDE):
            scaled.index(c).store((values[c] * factors[c].to(gl.float32)).to(dtype))
            squares += values[c] * values[c]
        for c in gl.static_range(CHUNKS):
            at = scaled.index(c * BK // WIDE).slice(c * BK % WIDE, BK, dim=1)
            given = given + (at.load(GIVEN),)
    else:
        wide = gl.arange(0, NW, layout=gl.SliceLayout(1, GIVEN))[:, None] * SHARE
        wide = wide + gl.arange(0, BK, layout=gl.SliceLayout(0, GIVEN))[None, :]
        for c in gl.static_range(CHUNKS):
            given = given + (gl.load(x + c * BK + wide),)
    acc = gl.zeros([NW, 16, 8], gl.float32, MMA)
    for c in gl.static_range(CHUNKS):
        if ROWS == 16:
            both, _ = gl.broadcast(gl.expand_dims(given[c], 2), gl.zeros([NW, BK, 8], dtype, RIGHT))
            acc += mma_v2(tiles[c], both, gl.zeros([NW, 16, 8], gl.float32, MMA))
        else:
            both, _ = gl.broadcast(gl.expand_dims(given[c], 1), gl.zeros([NW, 16, BK], dtype, LEFT))
            acc += mma_v2(both, tiles[c], gl.zeros([NW, 16, 8], gl.float32, MMA))
    # Warps meet: of 16 rows every column is the same, of 8 every row.
    SUMS: gl.constexpr = 16 * 8 // ROWS  # alike
    if ROWS == 8:
        acc = acc.permute(0, 2, 1)
    sums = gl.allocate_shared_memory(
        gl.float32, [NW * ROWS, SUMS], gl.SwizzledSharedLayout(1, 1, 1, order=[0, 1])
    )
    sums.store(acc.reshape([NW * ROWS, SUMS]))
    if HAS_NORM:
        of_squares = gl.allocate_shared_memory(gl.float32, [NW], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
        of_squares.store(gl.sum(squares, 1))
    one = sums.slice(0, 1, dim=1)
    value = gl.sum(one.slice(0, OUTS).load(LINES), 1)
    up = value
    if ACTIVATION:
        up = gl.sum(one.slice(8, OUTS).load(LINES), 1)
    for i in gl.static_range(1, NW):
        value += gl.sum(one.slice(i * ROWS, OUTS).load(LINES), 1)
        if ACTIVATION:
            up += gl.sum(one.slice(i * ROWS + 8, OUTS).load(LINES), 1)
    if HAS_NORM:
        square = 0.0
        for i in gl.static_range(NW):
            square += gl.sum(of_squares.slice(i, 1).load(gl.SliceLayout(1, LINES)), 0)
        scaled._keep_alive()  # what is apart in memory needs no barrier
        scale = gl.rsqrt(square / K + eps)
        value = value * scale
        up = up * scale
    if HAS_BIAS:
        value += gl.load(bias + target).to(gl.float32)
        if ACTIVATION:
            up += gl.load(bias + N + target).to(gl.float32)
    if ACTIVATION:
        value = activate(value, up, ACTIVATION)
    if HAS_RESIDUAL:
        value += before
    gl.store(out + target, value.to(out.dtype.element_ty))
