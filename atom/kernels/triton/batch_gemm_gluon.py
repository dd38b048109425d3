"""The product for a batch of decoding sequences on sm_90 in Gluon: steps of K in even shares over the multiprocessors.

A tile has 64 to 256 rows of the weight for up to 256 tokens. One warp brings weight and x, each group of four warps
turns its part of the rows; the weight is the left operand, so 64 rows meet all tokens of a tile in an instruction.

Tiles times steps of K are cut into as many runs as there are programs, each of neighbouring tiles, the last tile first.
Where a run ends inside a tile its sum goes to a workspace; the program with the tile's last step adds what lies there,
in the order of programs. It waits only for what others do first, so nobody waits long; and only for programs of lower
numbers, which a device starts before it, so that they need not all run at a time.

A gated product has gate and up rows alternating by eights, which brings both to the same thread.

In a decode step the launch before has left half of a norm, as for ``gemm_tile``: sums are multiplied by the other half.
A residual comes by the copy engine while the product is made, to where the result leaves from.
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

from atom.kernels.triton.gluon_parts import activate, barrier, bring, write

BK = gl.constexpr(64)  # columns of a step: 128 bytes, as wide as shared memory swizzles


@gluon.jit
def _own_share(num_tiles, token_tiles, steps):
    """Of this program: its tile of tokens, its number among those of that tile, their number, its run of steps."""
    tokens = gl.program_id(0) % token_tiles
    number = gl.program_id(0) // token_tiles
    programs = gl.num_programs(0) // token_tiles
    total = num_tiles * steps
    return tokens, number, programs, number * total // programs, (number + 1) * total // programs


@gluon.jit
def _bounds(tile, begin, end, steps):
    """Steps of ``tile`` that lie in the run."""
    return gl.maximum(begin - tile * steps, 0), gl.minimum(end - tile * steps, steps)


@gluon.jit
def _whose_start(tile, num_tiles, programs, steps):
    """The number of the program whose run has the first step of ``tile``."""
    return ((tile * steps + 1) * programs - 1) // (num_tiles * steps)


@gluon.jit
def _bring_rows(
    weight,
    w_ring,
    bar,
    stage,
    tile,
    step,
    IS_GATED: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Have the weight of one step of ``tile`` copied to ``stage``."""
    for part in gl.static_range(GROUPS):
        row = (tile * GROUPS + part) * ROWS
        if IS_GATED:
            place = [row // 16, 0, 0, step * BK]
        else:
            place = [row, step * BK]
        bring(weight, place, bar, w_ring.index(stage * GROUPS + part))


@gluon.jit
def _produce(
    weight,
    x,
    rings,
    share,
    IS_GATED: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The warp that brings both operands."""
    w_ring, x_ring, full, empty = rings
    num_tiles, token_tiles, steps = share
    tokens, number, programs, begin, end = _own_share(num_tiles, token_tiles, steps)
    last = (end - 1) // steps
    if PDL:
        # Weights on their way before the wait: what of the last tile, the first to be turned, the ring holds.
        first_step, end_step = _bounds(last, begin, end, steps)
        early = gl.minimum(end_step - first_step, STAGES)
        for stage in range(0, early):
            mbarrier.expect(full.index(stage), (GROUPS * ROWS + TOKENS) * BK * 2)
            _bring_rows(
                weight, w_ring, full.index(stage), stage, last, first_step + stage, IS_GATED, GROUPS, ROWS
            )
        gdc_launch_dependents()
        gdc_wait()
    else:
        early = 0
    brought = 0
    for back in range(0, last - begin // steps + 1):
        tile = last - back
        first_step, end_step = _bounds(tile, begin, end, steps)
        for step in range(first_step, end_step):
            stage = brought % STAGES
            if brought >= early:
                mbarrier.wait(empty.index(stage), (brought // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), (GROUPS * ROWS + TOKENS) * BK * 2)
                _bring_rows(weight, w_ring, full.index(stage), stage, tile, step, IS_GATED, GROUPS, ROWS)
            bring(x, [tokens * TOKENS, step * BK], full.index(stage), x_ring.index(stage))
            brought += 1


@gluon.jit
def _image(acc, ROWS: gl.constexpr, TOKENS: gl.constexpr, IMAGE: gl.constexpr):
    """``acc`` in the order in which threads hold it, four values a thread: nothing moves."""
    parts = gl.permute(gl.reshape(acc, (ROWS // 64, 4, 2, 8, TOKENS // 8, 4, 2)), (0, 4, 1, 3, 5, 2, 6))
    return gl.convert_layout(gl.reshape(parts, (ROWS * TOKENS // 512, 128, 4)), IMAGE)


@gluon.jit
def _matrix(image, ROWS: gl.constexpr, TOKENS: gl.constexpr, SUM: gl.constexpr):
    """The reverse of ``_image``."""
    parts = gl.permute(gl.reshape(image, (ROWS // 64, TOKENS // 8, 4, 8, 4, 2, 2)), (0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(gl.reshape(parts, (ROWS, TOKENS)), SUM)


@gluon.jit
def _halves(value, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    return gl.split(gl.permute(gl.reshape(value, (ROWS, 2, TOKENS // 2)), (0, 2, 1)))


@gluon.jit
def _norm_factor(squares, num_shares, stride, first, columns, eps, TOKENS: gl.constexpr, SUM: gl.constexpr):
    """What the norm multiplies the sums of each token by, ``[TOKENS]``; of tokens that are none, anything."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    AT_ONCE: gl.constexpr = 8192 // max(TOKENS, 128)  # 64 numbers a thread
    share = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, SPREAD))[:, None]
    token = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, SPREAD))[None, :]
    total = gl.zeros([AT_ONCE, TOKENS], gl.float32, SPREAD)
    for start in range(0, num_shares, AT_ONCE):
        is_there = (start + share < num_shares) & (token < stride)
        total += gl.load(squares + (start + share) * stride + token, mask=is_there, other=0.0)
    return gl.convert_layout(gl.rsqrt(gl.sum(total, 0) / columns + eps), gl.SliceLayout(0, SUM))


@gluon.jit
def _row_values(vector, place, N, ROWS: gl.constexpr, IS_GATED: gl.constexpr, SUM: gl.constexpr):
    """Of ``vector [N]``, gated ``[2 N]``, what belongs to the rows of a tile whose results begin at ``place``."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUM))
    if IS_GATED:
        column = place + row // 16 * 8 + row % 8
        spot = column + row // 8 % 2 * N
    else:
        column = place + row
        spot = column
    return gl.load(vector + spot, mask=column < N, other=0.0).to(gl.float32)


@gluon.jit
def _store_tokens(
    out,
    room,
    value,
    tokens,
    row,
    turn,
    FIRST: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Write ``value [ROWS, TOKENS]`` transposed, by as many tokens as a buffer has."""
    if TOKENS > CHUNK:
        first, second = _halves(value, ROWS, TOKENS)
        turn = _store_tokens(out, room, first, tokens, row, turn, FIRST, ROWS, TOKENS // 2, CHUNK)
        turn = _store_tokens(
            out, room, second, tokens + TOKENS // 2, row, turn, FIRST, ROWS, TOKENS // 2, CHUNK
        )
    else:
        buffer = room.index(FIRST + turn % 2)
        tma.store_wait(1)
        barrier()
        buffer.permute((1, 0)).store(value)
        fence_async_shared()
        barrier()
        write(out, [tokens, row], buffer)
        turn += 1
    return turn


@gluon.jit
def _store_squares(wide, squares, tokens, num_tokens, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    """Write the tile's share of each token's sum of squares, by 64 tokens: adding up takes shared memory."""
    if TOKENS > 64:
        first, second = _halves(wide, ROWS, TOKENS)
        _store_squares(first, squares, tokens, num_tokens, ROWS, TOKENS // 2)
        _store_squares(second, squares, tokens + TOKENS // 2, num_tokens, ROWS, TOKENS // 2)
    else:
        token = tokens + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, wide.type.layout))
        gl.store(squares + token, gl.sum(wide * wide, 0), mask=token < num_tokens)


@gluon.jit
def _consume(
    rings,
    room,
    sums,
    share,
    before,
    behind,
    PART: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_NEXT: gl.constexpr,
    PDL: gl.constexpr,
):
    """Four warps with part ``PART`` of every tile's rows."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    OUT_ROWS: gl.constexpr = ROWS // 2 if ACTIVATION else ROWS
    IS_GATED: gl.constexpr = ACTIVATION > 0
    FIRST: gl.constexpr = PART * (room.shape[0] // GROUPS)
    w_ring, x_ring, full, empty = rings
    partial, flags = sums
    num_tiles, token_tiles, steps = share
    squares_in, num_shares, eps, bias, stride = before
    out, residual, has_come, next_norm, next_out, squares_out = behind
    tokens, number, programs, begin, end = _own_share(num_tiles, token_tiles, steps)
    IMAGE: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    chunk = gl.arange(0, ROWS * TOKENS // 512, layout=gl.SliceLayout(1, gl.SliceLayout(2, IMAGE)))
    thread = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, IMAGE)))
    inner = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, IMAGE)))
    spot = (chunk[:, None] * 512 + thread[None, :] * 4)[:, :, None] + inner[None, None, :]
    if PDL and (HAS_NORM or HAS_RESIDUAL):
        gdc_wait()
    if HAS_NORM:
        factor = _norm_factor(squares_in, num_shares, stride, tokens * TOKENS, steps * BK, eps, TOKENS, SUM)
    last = (end - 1) // steps
    taken = 0
    turn = 0
    for back in range(0, last - begin // steps + 1):
        tile = last - back
        place = (tile * GROUPS + PART) * OUT_ROWS
        first_step, end_step = _bounds(tile, begin, end, steps)
        if HAS_NEXT:
            next_factor = _row_values(next_norm, place, out.shape[1], ROWS, IS_GATED, SUM)
        if HAS_BIAS:
            offset = _row_values(bias, place, out.shape[1], ROWS, IS_GATED, SUM)
        if HAS_RESIDUAL:  # noqa: SIM102 - decided while it is compiled
            if end_step == steps:
                # To where the result will leave from, once what left has left.
                tma.store_wait(0)
                barrier()
                mbarrier.expect(has_come.index(PART), OUT_ROWS * TOKENS * 2)
                bring(residual, [tokens * TOKENS, place], has_come.index(PART), room.index(FIRST))
        acc = gl.zeros([ROWS, TOKENS], gl.float32, SUM)
        for step in range(first_step, end_step):
            stage = taken % STAGES
            mbarrier.wait(full.index(stage), taken // STAGES & 1)
            acc = warpgroup_mma(
                w_ring.index(stage * GROUPS + PART).reshape((ROWS, BK)), x_ring.index(stage).permute((1, 0)), acc,
                use_acc=step > first_step, is_async=True,
            )  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((taken - 1) % STAGES), count=1, pred=step > first_step)
            taken += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((taken - 1) % STAGES), count=1)
        if end_step < steps:
            own = (number * token_tiles + tokens) * GROUPS + PART
            gl.store(partial + own * (ROWS * TOKENS) + spot, _image(acc, ROWS, TOKENS, IMAGE))
            barrier()
            gl.atomic_xchg(flags + own, 1, sem="release")
        else:
            for other in range(_whose_start(tile, num_tiles, programs, steps), number):
                slot = (other * token_tiles + tokens) * GROUPS + PART
                while gl.atomic_add(flags + slot, 0, sem="acquire") == 0:
                    pass
                barrier()
                acc += _matrix(gl.load(partial + slot * (ROWS * TOKENS) + spot), ROWS, TOKENS, SUM)
                gl.store(flags + slot, 0)
            if HAS_NORM:
                acc *= factor[None, :]
            if HAS_BIAS:
                acc += offset[:, None]
            if ACTIVATION:
                pairs = gl.permute(gl.reshape(acc, (ROWS // 16, 2, 8, TOKENS)), (0, 2, 3, 1))
                gate, up = gl.split(pairs)
                value = gl.reshape(activate(gate, up, ACTIVATION), (OUT_ROWS, TOKENS))
            else:
                value = acc
            if HAS_RESIDUAL:
                mbarrier.wait(has_come.index(PART), turn & 1)
                value += room.index(FIRST).permute((1, 0)).load(value.type.layout).to(gl.float32)
            narrow = value.to(out.dtype)
            if HAS_RESIDUAL or HAS_NEXT:
                if not HAS_RESIDUAL:
                    tma.store_wait(0)
                    barrier()
                room.index(FIRST).permute((1, 0)).store(narrow)
                wide = narrow.to(gl.float32)
                if HAS_NEXT:
                    next_value = wide * gl.convert_layout(
                        next_factor, gl.SliceLayout(1, value.type.layout)
                    ).expand_dims(1)
                    room.index(FIRST + 1).permute((1, 0)).store(next_value.to(out.dtype))
                fence_async_shared()
                barrier()
                write(out, [tokens * TOKENS, place], room.index(FIRST))
                if HAS_NEXT:
                    write(next_out, [tokens * TOKENS, place], room.index(FIRST + 1))
                    if place < out.shape[1]:
                        squares = squares_out + (tile * GROUPS + PART) * stride
                        _store_squares(wide, squares, tokens * TOKENS, out.shape[0], OUT_ROWS, TOKENS)
                turn += 1
            else:
                turn = _store_tokens(
                    out, room, narrow, tokens * TOKENS, place, turn, FIRST, OUT_ROWS, TOKENS, CHUNK
                )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_shares", "stride", "num_tiles", "token_tiles", "steps"])
def batch_gemm(
    weight,  # descriptors: [rows, K] by ROWS and BK; gated [rows / 16, 2, 8, K], gate and up rows by eights
    x,  # [M or more, K] by TOKENS and BK; times the norm's weight where there is a norm
    bias,  # [rows]
    residual,  # [M or more, N] as out; may be what out is
    out,  # [M, N] by CHUNK, or TOKENS, and the rows that a group of warps puts out
    squares_in,  # [num_shares, stride] fp32 of the launch that wrote x, if HAS_NORM
    next_norm,  # [N]
    next_out,  # as out: out times next_norm
    squares_out,  # [rows / ROWS, stride] fp32: shares of the sums of squares of out
    partial,  # [programs, GROUPS, ROWS, TOKENS] fp32
    flags,  # [programs, GROUPS] int32, zero between launches
    eps,
    num_shares,
    stride,
    num_tiles,  # of rows
    token_tiles,  # divides the number of programs
    steps,  # K / BK
    ACTIVATION: gl.constexpr,
    GROUPS: gl.constexpr,  # 1 or 2
    ROWS: gl.constexpr,  # of a group: 64 or 128
    TOKENS: gl.constexpr,
    CHUNK: gl.constexpr,
    BUFFERS: gl.constexpr,  # of CHUNK tokens a group; of a whole tile where there is a residual or a norm behind
    STAGES: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_NEXT: gl.constexpr,
    PDL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """``out = residual + act(norm(x) @ weight^T + bias)``."""
    dtype: gl.constexpr = x.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    IS_GATED: gl.constexpr = ACTIVATION > 0
    OUT_ROWS: gl.constexpr = ROWS // 2 if ACTIVATION else ROWS
    BLOCK: gl.constexpr = [ROWS // 16, 2, 8, BK] if ACTIVATION else [ROWS, BK]
    w_ring = gl.allocate_shared_memory(dtype, [STAGES * GROUPS] + BLOCK, weight.layout)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, BK], x.layout)
    room = gl.allocate_shared_memory(dtype, [GROUPS * BUFFERS, CHUNK, OUT_ROWS], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    has_come = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(has_come.index(i), count=1)
    fence_async_shared()
    rings = (w_ring, x_ring, full, empty)
    sums = (partial, flags)
    share = (num_tiles, token_tiles, steps)
    before = (squares_in, num_shares, eps, bias, stride)
    behind = (out, residual, has_come, next_norm, next_out, squares_out)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        rings, room, sums, share, before, behind, 0, ACTIVATION, GROUPS, ROWS, TOKENS, CHUNK, STAGES,
                        HAS_NORM, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, PDL,
                    ),
                ),
                (_produce, (weight, x, rings, share, IS_GATED, GROUPS, ROWS, TOKENS, STAGES, PDL)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        rings, room, sums, share, before, behind, 0, ACTIVATION, GROUPS, ROWS, TOKENS, CHUNK, STAGES,
                        HAS_NORM, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, PDL,
                    ),
                ),
                (
                    _consume,
                    (
                        rings, room, sums, share, before, behind, 1, ACTIVATION, GROUPS, ROWS, TOKENS, CHUNK, STAGES,
                        HAS_NORM, HAS_BIAS, HAS_RESIDUAL, HAS_NEXT, PDL,
                    ),
                ),
                (_produce, (weight, x, rings, share, IS_GATED, GROUPS, ROWS, TOKENS, STAGES, PDL)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
