"""``varlen_gluon`` without a warp of its own for the copies: eight warps share 128 rows and ask for keys themselves.

A program has one work and ends. Slower where programs are short, but with one kind of warp there is less to go wrong.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom.kernels.triton.attention_parts import LOG2_E, NEVER
from atom.kernels.triton.varlen_gluon import _bring, _bring_tile, _locate_keys, _place_rows, _weigh

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6 has the latter
ROWS = gl.constexpr(128)


@gluon.jit
def _advance_all(
    q_tile,
    k,
    v,
    keys,
    values,
    table,
    last_page,
    first_token,
    head,
    whole,
    diagonal,
    prefix,
    count,
    k_ring,
    v_ring,
    k_full,
    v_full,
    number,
    limit,
    factor,
    weights,
    best,
    total,
    acc,
    MASKED: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SCORE: gl.constexpr,
    SUM: gl.constexpr,
):
    """Score key tile ``number`` while the weights of the one before it meet their values; refill what was read."""
    stage = number % STAGES
    before = (number - 1) % STAGES
    blank = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    scored = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (number - 1) // STAGES & 1)
    summed = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[scored])
    _barrier()
    if number + STAGES < count:
        at, cached = _locate_keys(number + STAGES, whole, diagonal, prefix, KEYS)
        _bring_tile(
            k, keys, table, last_page, first_token + at, cached, head, k_full.index(stage), k_ring.index(stage),
            KV_HEADS, PAGE, DIM, KEYS,
        )  # fmt: skip
    if MASKED:
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORE))
        score = gl.where(column[None, :] <= limit[:, None], score, float("-inf"))
    weight, best, shrink = _weigh(score, best, factor)
    total = total * shrink + gl.sum(weight, 1)
    # Waiting here is early, but nothing moves past a wait: the assembler would take the softmax behind the product.
    mbarrier.wait(k_full.index((number + 1) % STAGES), (number + 1) // STAGES & 1, pred=number + 1 < count)
    acc, weights = warpgroup_mma_wait(0, deps=[summed, weights])
    _barrier()
    if number - 1 + STAGES < count:
        at, cached = _locate_keys(number - 1 + STAGES, whole, diagonal, prefix, KEYS)
        _bring_tile(
            v, values, table, last_page, first_token + at, cached, head, v_full.index(before), v_ring.index(before),
            KV_HEADS, PAGE, DIM, KEYS,
        )  # fmt: skip
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUM))[:, None]
    weights = gl.convert_layout(weight.to(q_tile.dtype), gl.DotOperandLayout(0, SUM, 2))
    return weights, best, total, acc


@gluon.jit(do_not_specialize=["num_tokens"])
def varlen_plain(
    q,  # as varlen_gluon.varlen_specialised takes them, except that q comes by whole tiles
    k,
    v,
    keys,
    values,
    tables,
    rows,
    tiles,
    sinks,
    output,
    scale,
    num_tokens,
    table_stride,
    HAS_ROWS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    TOKENS: gl.constexpr = ROWS // GROUP
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DIM, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [8, 1], [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = k.dtype
    head = gl.program_id(0)
    entry = tiles + gl.program_id(1) * 8
    seq = gl.load(entry)
    offset = gl.load(entry + 1)
    first_token = gl.load(entry + 2)
    query_len = gl.load(entry + 3)
    context_len = gl.load(entry + 4)
    place, is_row = _place_rows(
        output, True, head, seq, offset, first_token, query_len, num_tokens, ROWS, GROUP, KV_HEADS, DIM, STORE
    )
    if (seq < 0) | (context_len <= 0):
        gl.store(place, gl.zeros([ROWS, DIM], dtype, STORE), mask=is_row)
    else:
        prefix = gl.maximum(context_len - query_len, 0)
        whole = offset // KEYS
        diagonal = (gl.minimum(query_len, offset + TOKENS) + KEYS - 1) // KEYS - whole
        count = whole + diagonal + (prefix + KEYS - 1) // KEYS
        q_place = gl.allocate_shared_memory(dtype, [TOKENS, GROUP, DIM], q.layout)
        k_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], k.layout)
        v_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], v.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        mbarrier.init(q_full, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
        fence_async_shared()
        _barrier()
        row = seq.to(gl.int64)
        if HAS_ROWS:
            row = gl.load(rows + seq)
        table = tables + row * table_stride
        last_page = gl.maximum(prefix - 1, 0) // PAGE
        mbarrier.expect(q_full, ROWS * DIM * 2)
        _bring(q, [first_token + offset, head * GROUP, 0], q_full, q_place)
        for i in gl.static_range(STAGES):
            if i < count:
                at, cached = _locate_keys(i, whole, diagonal, prefix, KEYS)
                _bring_tile(
                    k, keys, table, last_page, first_token + at, cached, head, k_full.index(i), k_ring.index(i),
                    KV_HEADS, PAGE, DIM, KEYS,
                )  # fmt: skip
                _bring_tile(
                    v, values, table, last_page, first_token + at, cached, head, v_full.index(i), v_ring.index(i),
                    KV_HEADS, PAGE, DIM, KEYS,
                )  # fmt: skip

        q_tile = q_place.reshape((ROWS, DIM))
        factor = scale * LOG2_E
        seen = offset + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORE)) // GROUP
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORE))
        mbarrier.wait(q_full, 0)
        mbarrier.wait(k_full.index(0), 0)
        blank = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
        score = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), blank, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        _barrier()
        if count > STAGES:
            at, cached = _locate_keys(STAGES, whole, diagonal, prefix, KEYS)
            _bring_tile(
                k, keys, table, last_page, first_token + at, cached, head, k_full.index(0), k_ring.index(0),
                KV_HEADS, PAGE, DIM, KEYS,
            )  # fmt: skip
        limit = seen - (whole + diagonal - 1) * KEYS
        score = gl.where(column[None, :] <= limit[:, None], score, float("-inf"))
        weight, best, shrink = _weigh(
            score, gl.full([ROWS], NEVER, gl.float32, gl.SliceLayout(1, SCORE)), factor
        )
        total = gl.sum(weight, 1)
        weights = gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, SUM, 2))
        acc = gl.zeros([ROWS, DIM], gl.float32, SUM)
        num_masked = diagonal + (prefix % KEYS > 0).to(gl.int32)
        mbarrier.wait(k_full.index(1), 0, pred=count > 1)
        for number in range(1, num_masked):
            limit = seen - (whole + diagonal - 1 - number) * KEYS
            limit = gl.where(number < diagonal, limit, prefix % KEYS - 1)
            weights, best, total, acc = _advance_all(
                q_tile, k, v, keys, values, table, last_page, first_token, head, whole, diagonal, prefix, count,
                k_ring, v_ring, k_full, v_full, number, limit, factor, weights, best, total, acc, True, KV_HEADS,
                PAGE, DIM, KEYS, STAGES, SCORE, SUM,
            )  # fmt: skip
        for number in range(num_masked, count):
            weights, best, total, acc = _advance_all(
                q_tile, k, v, keys, values, table, last_page, first_token, head, whole, diagonal, prefix, count,
                k_ring, v_ring, k_full, v_full, number, limit, factor, weights, best, total, acc, False, KV_HEADS,
                PAGE, DIM, KEYS, STAGES, SCORE, SUM,
            )  # fmt: skip
        last = (count - 1) % STAGES
        mbarrier.wait(v_full.index(last), (count - 1) // STAGES & 1)
        acc = warpgroup_mma(weights, v_ring.index(last), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        if HAS_SINKS:
            own_head = head * GROUP + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORE)) % GROUP
            total += gl.exp2(gl.load(sinks + own_head).to(gl.float32) * LOG2_E - best)
        share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUM))
        gl.store(place, gl.convert_layout((acc * share[:, None]).to(dtype), STORE), mask=is_row)
