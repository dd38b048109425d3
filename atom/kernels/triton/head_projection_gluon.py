"""Query, key and value heads of many tokens for sm_90 in Gluon: their product, norm, rotation and way into the cache.

The product is that of ``gated_gluon``: a tile has 128 tokens, in two groups of four warps, and 256 columns, which are
whole heads. Rows of the weight are brought so that the first halves of its heads lie before the second halves: then the
two channels that turn together end in the same thread. What is written is what attention reads; keys and values go to
the cache as well, from the shared memory that they are written from. Sums, norm and rotation are fp32, rounded once.
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

from atom.kernels.triton.gluon_parts import bring, finite, next_stage, place_tile, write

ROWS = gl.constexpr(64)  # tokens of a group of four warps: a product's rows
WIDTH = gl.constexpr(256)  # columns of a tile
STEP = gl.constexpr(64)  # of K: the 128 bytes that a swizzled row has


@gluon.jit
def _produce(
    x,
    weight,
    x_rings,
    w_ring,
    full,
    empty,
    num_tiles,
    num_rows,
    num_columns,
    K,
    HALF: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that brings tiles of x and of the weights."""
    HEADS: gl.constexpr = WIDTH // (2 * HALF)
    stage = 0
    phase = 1
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = place_tile(number, num_rows, num_columns, BAND)
        token = row * (2 * ROWS)
        first = column * WIDTH
        for k in range(0, K, STEP):
            bar = full.index(stage)
            w_tile = w_ring.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (2 * ROWS + WIDTH) * STEP * 2)
            for i in gl.static_range(HEADS):
                bring(weight, [first + 2 * i * HALF, k], bar, w_tile.slice(i * HALF, HALF))
            for i in gl.static_range(2):
                bring(x, [token + i * ROWS, k], bar, x_rings[i].index(stage))
            for i in gl.static_range(HEADS):
                bring(weight, [first + (2 * i + 1) * HALF, k], bar, w_tile.slice((HEADS + i) * HALF, HALF))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consume(
    output,
    cos,
    sin,
    norm,
    keys,
    values,
    slots,
    x_ring,
    w_ring,
    result,
    full,
    empty,
    eps,
    num_tokens,
    num_tiles,
    num_rows,
    num_columns,
    K,
    PART: gl.constexpr,
    HAS_NORM: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    HALF: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps with the tokens of part ``PART`` of every tile."""
    HEADS: gl.constexpr = WIDTH // (2 * HALF)
    DIM: gl.constexpr = 2 * HALF
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    stage = 0
    phase = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = place_tile(number, num_rows, num_columns, BAND)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, PRODUCT)
        mbarrier.wait(full.index(stage), phase)
        w_tile = w_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(x_ring.index(stage), w_tile, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
        for _ in range(STEP, K, STEP):
            mbarrier.wait(full.index(stage), phase)
            w_tile = w_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(x_ring.index(stage), w_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # this step's product runs on, the one before is done
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        head = column * HEADS
        start = (2 * row + PART) * ROWS
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(before), count=1)
        first, second = acc.reshape([ROWS, 2, HEADS, HALF]).permute(0, 2, 3, 1).split()
        LAYOUT: gl.constexpr = first.type.layout
        if head < NUM_HEADS + KV_HEADS:
            if HAS_NORM:
                OF_HEADS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
                own = gl.arange(0, HEADS, layout=gl.SliceLayout(1, OF_HEADS))
                part = gl.arange(0, HALF, layout=gl.SliceLayout(0, OF_HEADS))
                factors = norm + (head + own)[:, None] * DIM + part[None, :]
                inverse = gl.rsqrt(gl.sum(first * first + second * second, 2) / DIM + eps)
                inverse = gl.expand_dims(inverse, 2)
                first = first * inverse * gl.expand_dims(gl.load(factors), 0)
                second = second * inverse * gl.expand_dims(gl.load(factors + HALF), 0)
            OF_TOKENS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
            token = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OF_TOKENS))
            channel = gl.arange(0, HALF, layout=gl.SliceLayout(0, OF_TOKENS))
            angle = token[:, None] * DIM + channel[None, :]
            is_token = (token < num_tokens)[:, None]
            # Both halves of a row of cos are alike, and so are those of sin but for the sign of the first.
            turn = gl.expand_dims(gl.load(cos + angle, mask=is_token, other=0.0).to(gl.float32), 1)
            lean = gl.expand_dims(gl.load(sin + HALF + angle, mask=is_token, other=0.0).to(gl.float32), 1)
            turned = first * turn - second * lean
            second = second * turn + first * lean
            first = turned
        heads = gl.join(first, second).permute(0, 1, 3, 2).reshape([ROWS, WIDTH]).to(result.dtype)
        if head >= NUM_HEADS:
            # Attention reads them, and multiplies what it masks by zero.
            heads = finite(heads)
        tma.store_wait(0)  # what was written from here has been read
        result.store(heads)
        fence_async_shared()
        write(output, [start, column * WIDTH], result)
        if head >= NUM_HEADS:
            kept = result.load(STORE)
            own_token = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
            slot = gl.load(slots + own_token, mask=own_token < num_tokens, other=-1)
            at = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STORE))
            is_key = head < NUM_HEADS + KV_HEADS
            kv_head = head - NUM_HEADS - gl.where(is_key, 0, KV_HEADS) + at // DIM
            line = slot // PAGE * (KV_HEADS * PAGE * DIM) + slot % PAGE * DIM
            place = line[:, None] + (kv_head * (PAGE * DIM) + at % DIM)[None, :]
            is_stored = (slot >= 0)[:, None]
            if is_key:
                gl.store(keys + place, kept, mask=is_stored)
            else:
                gl.store(values + place, kept, mask=is_stored)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens", "num_tiles", "num_rows", "num_columns", "K"])
def projection_sm90(
    x,  # descriptors: [num_tokens, K] by ROWS and STEP
    weight,  # [heads * dim, K] by halves of heads and STEP
    output,  # [num_tokens, heads * dim] by ROWS and WIDTH
    cos,
    sin,
    norm,
    keys,
    values,
    slots,
    eps,
    num_tokens,
    num_tiles,
    num_rows,  # of tiles
    num_columns,
    K,
    HAS_NORM: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    HALF: gl.constexpr,
    BAND: gl.constexpr,  # token tiles
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = x.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, WIDTH, STEP], weight.layout)
    x_rings = ()
    results = ()
    for _ in gl.static_range(2):
        x_rings = x_rings + (gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], x.layout),)
        results = results + (gl.allocate_shared_memory(dtype, [ROWS, WIDTH], output.layout),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    output, cos, sin, norm, keys, values, slots, x_rings[0], w_ring, results[0], full, empty, eps,
                    num_tokens, num_tiles, num_rows, num_columns, K, 0, HAS_NORM, NUM_HEADS, KV_HEADS, PAGE, HALF,
                    BAND, STAGES,
                ),
            ),
            (
                _consume,
                (
                    output, cos, sin, norm, keys, values, slots, x_rings[1], w_ring, results[1], full, empty, eps,
                    num_tokens, num_tiles, num_rows, num_columns, K, 1, HAS_NORM, NUM_HEADS, KV_HEADS, PAGE, HALF,
                    BAND, STAGES,
                ),
            ),
            (
                _produce,
                (x, weight, x_rings, w_ring, full, empty, num_tiles, num_rows, num_columns, K, HALF, BAND, STAGES),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
