"""Prefill attention for sm_90 in Gluon: one warp brings keys and values, two groups of warps each turn 64 rows.

The same steps as ``varlen_attention``, whose list of tiles it takes. A tile has 128 rows: query heads of one kv head
for consecutive tokens, the first half of them in one group of warps, the second in the other. The ring of key and
value tiles outlasts a work (a tile of one kv head), so the next one's keys arrive while this one ends. While the
softmax of a key tile runs, the product with the values before it does.

Programs stay: there are as many as fit the device, each takes every n-th work, forwards and backwards in turn, which
evens out what the list, longest first, leaves uneven.

Of a work's key tiles come first those that rows see in part: this step's on the diagonal, then the last of the
cached ones; behind them all that every row sees whole.
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
from atom.kernels.triton.gluon_parts import bring

ROWS = gl.constexpr(64)  # of a group of four warps: a product's rows


@gluon.jit
def _take_work(tiles, turn, num_works, num_tokens, KV_HEADS: gl.constexpr):
    """This program's work number ``turn``: whether there is one, its kv head, and the tile's entry."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    number = turn * programs + place
    is_listed = number < num_works
    number = gl.minimum(number, num_works - 1)
    entry = tiles + number // KV_HEADS * 8
    seq = gl.load(entry)
    offset = gl.load(entry + 1)
    first_token = gl.load(entry + 2)
    query_len = gl.load(entry + 3)
    context_len = gl.load(entry + 4)
    # Behind the tiles the list has the step's padding, and behind that nothing: a bucket has room for many sequences.
    is_work = is_listed & ((seq >= 0) | (offset < num_tokens))
    return is_work, number % KV_HEADS, seq, offset, first_token, query_len, context_len


@gluon.jit
def _count_keys(seq, offset, query_len, context_len, TOKENS: gl.constexpr, KEYS: gl.constexpr):
    """Key tiles of a work: this step's that all rows see whole, its others, in all; and the cached keys."""
    prefix = gl.maximum(context_len - query_len, 0)
    whole = offset // KEYS
    diagonal = (gl.minimum(query_len, offset + TOKENS) + KEYS - 1) // KEYS - whole
    count = whole + diagonal + (prefix + KEYS - 1) // KEYS
    count = gl.where((seq >= 0) & (context_len > 0), count, 0)
    return whole, diagonal, count, prefix


@gluon.jit
def _locate_keys(number, whole, diagonal, prefix, KEYS: gl.constexpr):
    """First key of a work's key tile ``number`` among this step's, and among the cached ones: -1 if not there."""
    at = (whole + diagonal - 1 - number) * KEYS
    cached = -1
    rest = number - diagonal - (prefix % KEYS > 0).to(gl.int32)
    if number >= diagonal:
        at = (whole - 1 - rest) * KEYS
        if rest < 0:
            cached = prefix // KEYS * KEYS
        if rest >= whole:
            cached = (rest - whole) * KEYS
    return at, cached


@gluon.jit
def _bring_tile(
    own,
    paged,
    table,
    last_page,
    row,
    cached,
    head,
    bar,
    tile,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Have ``tile`` filled with rows of this step from ``row`` on, or with cached ones unless ``cached`` is -1."""
    mbarrier.expect(bar, KEYS * DIM * 2)
    if cached < 0:
        bring(own, [row, head * DIM], bar, tile)
    else:
        # Behind the last page there is nothing to bring, but what lies there must be finite.
        for at in gl.static_range(0, KEYS, 4 * PAGE):  # more addresses at a time have no registers
            rows = ()
            for i in gl.static_range(at, min(at + 4 * PAGE, KEYS), PAGE):
                page = gl.load(table + gl.minimum((cached + i) // PAGE, last_page))
                rows = rows + ((page * KV_HEADS + head) * PAGE,)
            for i in gl.static_range(at, min(at + 4 * PAGE, KEYS), PAGE):
                bring(paged, [rows[(i - at) // PAGE], 0], bar, tile.slice(i, PAGE))


@gluon.jit
def _produce(
    q,
    k,
    v,
    keys,
    values,
    tables,
    rows,
    tiles,
    num_works,
    num_tokens,
    table_stride,
    q_first,
    q_second,
    k_ring,
    v_ring,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    HAS_ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    HALF_TOKENS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The warp that brings queries, keys and values."""
    Q_BYTES: gl.constexpr = HALF_TOKENS * GROUP * DIM * 2
    brought = 0  # key tiles
    works = 0
    turn = 0
    is_work, head, seq, offset, first_token, query_len, context_len = _take_work(
        tiles, 0, num_works, num_tokens, KV_HEADS
    )
    while is_work:
        whole, diagonal, count, prefix = _count_keys(
            seq, offset, query_len, context_len, 2 * HALF_TOKENS, KEYS
        )
        if count > 0:
            row = seq.to(gl.int64)
            if HAS_ROWS:
                row = gl.load(rows + seq)
            table = tables + row * table_stride
            last_page = gl.maximum(prefix - 1, 0) // PAGE
            for number in range(0, count):
                at, cached = _locate_keys(number, whole, diagonal, prefix, KEYS)
                stage = brought % STAGES
                phase = (brought // STAGES & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                _bring_tile(
                    k, keys, table, last_page, first_token + at, cached, head, k_full.index(stage),
                    k_ring.index(stage), KV_HEADS, PAGE, DIM, KEYS,
                )  # fmt: skip
                if number == 0:  # behind the first keys, whose place is free earlier
                    token = first_token + offset
                    mbarrier.wait(q_empty.index(0), (works & 1) ^ 1)
                    mbarrier.expect(q_full.index(0), Q_BYTES)
                    bring(q, [token, head * GROUP, 0], q_full.index(0), q_first)
                    mbarrier.wait(q_empty.index(1), (works & 1) ^ 1)
                    mbarrier.expect(q_full.index(1), Q_BYTES)
                    bring(q, [token + HALF_TOKENS, head * GROUP, 0], q_full.index(1), q_second)
                mbarrier.wait(v_empty.index(stage), phase)
                _bring_tile(
                    v, values, table, last_page, first_token + at, cached, head, v_full.index(stage),
                    v_ring.index(stage), KV_HEADS, PAGE, DIM, KEYS,
                )  # fmt: skip
                brought += 1
            works += 1
        turn += 1
        is_work, head, seq, offset, first_token, query_len, context_len = _take_work(
            tiles, turn, num_works, num_tokens, KV_HEADS
        )


@gluon.jit
def _weigh(score, best, factor):
    """Weights of scores, the new maximum, and by what earlier weights shrink."""
    new_best = gl.maximum(best, gl.max(score, 1) * factor)
    weight = gl.exp2(score * factor - new_best[:, None])
    return weight, new_best, gl.exp2(best - new_best)


@gluon.jit
def _advance(
    q_tile,
    k_ring,
    v_ring,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    taken,
    is_last,
    limit,
    factor,
    weights,
    best,
    total,
    acc,
    PART: gl.constexpr,
    MASKED: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SCORE: gl.constexpr,
    SUM: gl.constexpr,
):
    """Score key tile ``taken`` while the weights of the one before it meet their values."""
    stage = taken % STAGES
    blank = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    scored = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)
    before = (taken - 1) % STAGES
    mbarrier.wait(v_full.index(before), (taken - 1) // STAGES & 1)
    summed = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[scored])
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(q_empty.index(PART), count=1, pred=is_last)
    if MASKED:
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORE))
        score = gl.where(column[None, :] <= limit[:, None], score, float("-inf"))
    weight, best, shrink = _weigh(score, best, factor)
    total = total * shrink + gl.sum(weight, 1)
    # Waiting here is early, but nothing moves past a wait: the assembler would take the softmax behind the product.
    mbarrier.wait(k_full.index((taken + 1) % STAGES), (taken + 1) // STAGES & 1, pred=not is_last)
    acc, weights = warpgroup_mma_wait(0, deps=[summed, weights])
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUM))[:, None]
    weights = gl.convert_layout(weight.to(q_tile.dtype), gl.DotOperandLayout(0, SUM, 2))
    return weights, best, total, acc


@gluon.jit
def _place_rows(
    output,
    head,
    seq,
    offset,
    first_token,
    query_len,
    num_tokens,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    STORE: gl.constexpr,
):
    """Addresses of rows in the output, and which of them there are."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORE))
    at = offset + row // GROUP
    # Entries without a sequence say where in the step their padding begins.
    token = gl.where(seq >= 0, first_token, 0) + at
    is_row = (token < num_tokens) & ((seq < 0) | (at < query_len))
    place = (token.to(gl.int64) * (GROUP * KV_HEADS) + head * GROUP + row % GROUP)[:, None] * DIM + dim[
        None, :
    ]
    return output + place, is_row[:, None]


@gluon.jit
def _consume(
    tiles,
    sinks,
    output,
    scale,
    num_works,
    num_tokens,
    q_tile,
    k_ring,
    v_ring,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    PART: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    HALF_TOKENS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps with the rows of half ``PART`` of every tile."""
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_tile.dtype
    factor = scale * LOG2_E
    row_token = PART * HALF_TOKENS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORE)) // GROUP
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORE))
    taken = 0  # key tiles
    works = 0
    turn = 0
    is_work, head, seq, offset, first_token, query_len, context_len = _take_work(
        tiles, 0, num_works, num_tokens, KV_HEADS
    )
    while is_work:
        turn += 1
        whole, diagonal, count, prefix = _count_keys(
            seq, offset, query_len, context_len, 2 * HALF_TOKENS, KEYS
        )
        if count > 0:
            mbarrier.wait(q_full.index(PART), works & 1)
            stage = taken % STAGES
            mbarrier.wait(k_full.index(stage), taken // STAGES & 1)
            blank = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
            score = warpgroup_mma(
                q_tile, k_ring.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True
            )
            score = warpgroup_mma_wait(0, deps=[score])
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.arrive(q_empty.index(PART), count=1, pred=count == 1)
            seen = offset + row_token  # the last key of this step that a row sees
            limit = seen - (whole + diagonal - 1) * KEYS
            score = gl.where(column[None, :] <= limit[:, None], score, float("-inf"))
            best = gl.full([ROWS], NEVER, gl.float32, gl.SliceLayout(1, SCORE))
            weight, best, shrink = _weigh(score, best, factor)
            total = gl.sum(weight, 1)
            weights = gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, SUM, 2))
            acc = gl.zeros([ROWS, DIM], gl.float32, SUM)
            num_masked = diagonal + (prefix % KEYS > 0).to(gl.int32)
            mbarrier.wait(k_full.index((taken + 1) % STAGES), (taken + 1) // STAGES & 1, pred=count > 1)
            for number in range(1, num_masked):
                limit = seen - (whole + diagonal - 1 - number) * KEYS
                limit = gl.where(number < diagonal, limit, prefix % KEYS - 1)
                weights, best, total, acc = _advance(
                    q_tile, k_ring, v_ring, q_empty, k_full, k_empty, v_full, v_empty, taken + number,
                    number + 1 == count, limit, factor, weights, best, total, acc, PART, True, KEYS, STAGES, SCORE,
                    SUM,
                )  # fmt: skip
            for number in range(num_masked, count):
                weights, best, total, acc = _advance(
                    q_tile, k_ring, v_ring, q_empty, k_full, k_empty, v_full, v_empty, taken + number,
                    number + 1 == count, limit, factor, weights, best, total, acc, PART, False, KEYS, STAGES, SCORE,
                    SUM,
                )  # fmt: skip
            taken += count
            works += 1
            place, is_row = _place_rows(
                output, head, seq, offset + PART * HALF_TOKENS, first_token, query_len, num_tokens, ROWS,
                GROUP, KV_HEADS, DIM, STORE,
            )  # fmt: skip
            # The next work's entry comes while this one ends.
            if HAS_SINKS:
                own_head = head * GROUP + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORE)) % GROUP
                total += gl.exp2(gl.load(sinks + own_head).to(gl.float32) * LOG2_E - best)
            is_work, head, seq, offset, first_token, query_len, context_len = _take_work(
                tiles, turn, num_works, num_tokens, KV_HEADS
            )
            stage = (taken - 1) % STAGES
            mbarrier.wait(v_full.index(stage), (taken - 1) // STAGES & 1)
            acc = warpgroup_mma(weights, v_ring.index(stage), acc, is_async=True)
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(v_empty.index(stage), count=1)
            share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUM))
            result = gl.convert_layout((acc * share[:, None]).to(dtype), STORE)
            gl.store(place, result, mask=is_row)
        else:
            place, is_row = _place_rows(
                output, head, seq, offset + PART * HALF_TOKENS, first_token, query_len, num_tokens, ROWS,
                GROUP, KV_HEADS, DIM, STORE,
            )  # fmt: skip
            gl.store(place, gl.zeros([ROWS, DIM], dtype, STORE), mask=is_row)
            is_work, head, seq, offset, first_token, query_len, context_len = _take_work(
                tiles, turn, num_works, num_tokens, KV_HEADS
            )


@gluon.jit(do_not_specialize=["num_tokens", "num_works"])
def varlen_sm90(
    q,  # descriptors: [num_tokens, num_heads, DIM] by halves of tiles
    k,  # [num_tokens, KV_HEADS * DIM] by KEYS and a head
    v,
    keys,  # [num_blocks * KV_HEADS * PAGE, DIM] by pages
    values,
    tables,
    rows,
    tiles,
    sinks,
    output,
    scale,
    num_tokens,
    num_works,  # tiles of the list times KV_HEADS
    table_stride,
    HAS_ROWS: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    HALF_TOKENS: gl.constexpr = ROWS // GROUP
    dtype: gl.constexpr = k.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_first = gl.allocate_shared_memory(dtype, [HALF_TOKENS, GROUP, DIM], q.layout)
    q_second = gl.allocate_shared_memory(dtype, [HALF_TOKENS, GROUP, DIM], q.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], k.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    tiles, sinks, output, scale, num_works, num_tokens, q_first.reshape((ROWS, DIM)), k_ring, v_ring,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, 0, HAS_SINKS, GROUP, KV_HEADS,
                    DIM, HALF_TOKENS, KEYS, STAGES,
                ),
            ),
            (
                _consume,
                (
                    tiles, sinks, output, scale, num_works, num_tokens, q_second.reshape((ROWS, DIM)), k_ring, v_ring,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, 1, HAS_SINKS, GROUP, KV_HEADS,
                    DIM, HALF_TOKENS, KEYS, STAGES,
                ),
            ),
            (
                _produce,
                (
                    q, k, v, keys, values, tables, rows, tiles, num_works, num_tokens, table_stride, q_first, q_second,
                    k_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty, HAS_ROWS, GROUP, KV_HEADS, PAGE,
                    DIM, HALF_TOKENS, KEYS, STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
