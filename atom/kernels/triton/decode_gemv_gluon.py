"""The one-token product for sm_90 in Gluon: a warp owns whole rows and reads x in its own layout, no shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
