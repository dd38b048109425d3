"""The product of a gated MLP with its activation for sm_90 in Gluon: ``activation(x gate^T) * (x up^T)``.

A tile has 64 tokens for each group of four warps that multiplies, and 128 columns: those of the gate and those of the
up projection end in the same threads, so that what is written is half of what was multiplied and is not read again.
One warp brings rows of x and of both weights, in steps of 64 of K, through a ring that outlasts a tile: while a tile
is activated and written the next one's first steps arrive.

Two groups have one accumulator for gate and up, whose products are as wide as they get. Three groups read less of the
weights for a token, which counts where power limits the clocks; with 512 threads the assembler refuses an accumulator
of 256 columns, so they have two of 128.

Programs stay: as many as there are multiprocessors, each takes every n-th tile. Tiles are numbered down a band of
token tiles, then to the next columns, so that what runs at a time shares its rows of x and of the weights in L2.
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

from atom.kernels.triton.attention_parts import LOG2_E
from atom.kernels.triton.decode_parts import GELU_CUBE, ROOT_2_OVER_PI
from atom.kernels.triton.gluon_parts import bring, next_stage, place_tile, write

ROWS = gl.constexpr(64)  # tokens of a group of four warps: a product's rows
COLUMNS = gl.constexpr(128)  # of a tile; twice as many are multiplied
STEP = gl.constexpr(64)  # of K: the 128 bytes that a swizzled row has


@gluon.jit
def _reciprocal(value):
    """Without the scaling of a division: values are 1 or more; 0 for infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=gl.float32, is_pure=True, pack=1
    )


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
    size,
    K,
    GROUPS: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that brings tiles of x and of the weights."""
    stage = 0
    phase = 1
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = place_tile(number, num_rows, num_columns, BAND)
        token = row * (GROUPS * ROWS)
        gate = column * COLUMNS
        for k in range(0, K, STEP):
            bar = full.index(stage)
            w_tile = w_ring.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (GROUPS * ROWS + 2 * COLUMNS) * STEP * 2)
            bring(weight, [gate, k], bar, w_tile.slice(0, COLUMNS))
            for i in gl.static_range(GROUPS):
                bring(x, [token + i * ROWS, k], bar, x_rings[i].index(stage))
            bring(weight, [size + gate, k], bar, w_tile.slice(COLUMNS, COLUMNS))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _multiply(x_tile, w_tile, gate, up, IS_FIRST: gl.constexpr, IS_JOINED: gl.constexpr):
    """Start the product of a step: into one accumulator of gate and up if ``IS_JOINED``, else into two."""
    if IS_JOINED:
        gate = warpgroup_mma(x_tile, w_tile.permute((1, 0)), gate, use_acc=not IS_FIRST, is_async=True)
    else:
        first = w_tile.slice(0, COLUMNS).permute((1, 0))
        second = w_tile.slice(COLUMNS, COLUMNS).permute((1, 0))
        gate = warpgroup_mma(x_tile, first, gate, use_acc=not IS_FIRST, is_async=True)
        up = warpgroup_mma(x_tile, second, up, use_acc=not IS_FIRST, is_async=True)
    return gate, up


@gluon.jit
def _wait(gate, up, NUM_STEPS: gl.constexpr, IS_JOINED: gl.constexpr):
    """Wait until the products of no more than ``NUM_STEPS`` steps run."""
    if IS_JOINED:
        gate = warpgroup_mma_wait(NUM_STEPS, deps=[gate])
    else:
        gate, up = warpgroup_mma_wait(2 * NUM_STEPS, deps=[gate, up])
    return gate, up


@gluon.jit
def _consume(
    output,
    x_ring,
    w_ring,
    result,
    full,
    empty,
    num_tiles,
    num_rows,
    num_columns,
    K,
    PART: gl.constexpr,
    GROUPS: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    IS_SILU: gl.constexpr,
):
    """Four warps with the tokens of part ``PART`` of every tile."""
    IS_JOINED: gl.constexpr = GROUPS == 2
    WIDTH: gl.constexpr = 2 * COLUMNS if IS_JOINED else COLUMNS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    stage = 0
    phase = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = place_tile(number, num_rows, num_columns, BAND)
        gate = gl.zeros([ROWS, WIDTH], gl.float32, PRODUCT)
        up = gate
        mbarrier.wait(full.index(stage), phase)
        gate, up = _multiply(x_ring.index(stage), w_ring.index(stage), gate, up, True, IS_JOINED)
        gate, up = _wait(gate, up, 1, IS_JOINED)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
        for _ in range(STEP, K, STEP):
            mbarrier.wait(full.index(stage), phase)
            gate, up = _multiply(x_ring.index(stage), w_ring.index(stage), gate, up, False, IS_JOINED)
            gate, up = _wait(gate, up, 1, IS_JOINED)  # this step's product runs on, the one before is done
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        gate, up = _wait(gate, up, 0, IS_JOINED)
        mbarrier.arrive(empty.index(before), count=1)
        if IS_JOINED:
            gate, up = gate.reshape([ROWS, 2, COLUMNS]).permute(0, 2, 1).split()
        if IS_SILU:
            power = gate * -LOG2_E
        else:  # gelu by tanh: 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z))
            power = gate * (1.0 + GELU_CUBE * gate * gate) * (-2 * ROOT_2_OVER_PI * LOG2_E)
        gated = gate * up * _reciprocal(1.0 + gl.exp2(power))
        tma.store_wait(0)  # what was written from here has been read
        result.store(gated.to(result.dtype))
        fence_async_shared()
        write(output, [(row * GROUPS + PART) * ROWS, column * COLUMNS], result)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles", "num_rows", "num_columns", "size", "K"])
def gated_sm90(
    x,  # descriptors: [num_tokens, K] by ROWS and STEP
    weight,  # [gate | up, K] by COLUMNS and STEP
    output,  # [num_tokens, size] by ROWS and COLUMNS
    num_tiles,
    num_rows,  # of tiles
    num_columns,
    size,
    K,
    GROUPS: gl.constexpr,  # of four warps that multiply: 2 or 3
    BAND: gl.constexpr,  # token tiles
    STAGES: gl.constexpr,
    IS_SILU: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = x.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, 2 * COLUMNS, STEP], weight.layout)
    x_rings = ()
    results = ()
    for _ in gl.static_range(GROUPS):
        x_rings = x_rings + (gl.allocate_shared_memory(dtype, [STAGES, ROWS, STEP], x.layout),)
        results = results + (gl.allocate_shared_memory(dtype, [ROWS, COLUMNS], output.layout),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        output, x_rings[0], w_ring, results[0], full, empty, num_tiles, num_rows, num_columns, K,
                        0, GROUPS, BAND, STAGES, IS_SILU,
                    ),
                ),
                (
                    _consume,
                    (
                        output, x_rings[1], w_ring, results[1], full, empty, num_tiles, num_rows, num_columns, K,
                        1, GROUPS, BAND, STAGES, IS_SILU,
                    ),
                ),
                (
                    _produce,
                    (
                        x, weight, x_rings, w_ring, full, empty, num_tiles, num_rows, num_columns, size, K,
                        GROUPS, BAND, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        output, x_rings[0], w_ring, results[0], full, empty, num_tiles, num_rows, num_columns, K,
                        0, GROUPS, BAND, STAGES, IS_SILU,
                    ),
                ),
                (
                    _consume,
                    (
                        output, x_rings[1], w_ring, results[1], full, empty, num_tiles, num_rows, num_columns, K,
                        1, GROUPS, BAND, STAGES, IS_SILU,
                    ),
                ),
                (
                    _consume,
                    (
                        output, x_rings[2], w_ring, results[2], full, empty, num_tiles, num_rows, num_columns, K,
                        2, GROUPS, BAND, STAGES, IS_SILU,
                    ),
                ),
                (
                    _produce,
                    (
                        x, weight, x_rings, w_ring, full, empty, num_tiles, num_rows, num_columns, size, K,
                        GROUPS, BAND, STAGES,
                    ),
                ),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
