"""Attention of very few sequences for sm_90 in Gluon: small programs, scores by tensor cores, few exchanges.

What ``fused_attention.columns`` does, in another arrangement. A program has one kv head with all its query
heads and a share of the value columns, and few enough registers to start beside the projection before it, so that
keys and values arrive while that runs. A warp owns 16 keys of a tile and holds them as the operand of its products;
each warp normalises and rotates one head. Behind the wait threads meet for the queries, the highest score, the
weights and the sums of the values.

The new key's score is worked out once, from the queries' own exchange, and takes its place among the others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.attention_parts import LOG2_E, NEVER
from atom.kernels.triton.gluon_parts import finite

HEADS_OF_TILE = gl.constexpr(8)  # query heads in a product


@gluon.jit
def _capped(score, soft_cap, HAS_SOFT_CAP: gl.constexpr):
    """Scores in units of log2, after the soft cap."""
    if HAS_SOFT_CAP:
        score = soft_cap * (1.0 - 2.0 / (gl.exp2(score / soft_cap * (2 * LOG2_E)) + 1.0))
    return score * LOG2_E


@gluon.jit
def _rows(table, token, mask, head, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr):
    """Where the keys of ``token`` begin in the cache."""
    block = gl.load(table + token // PAGE, mask=mask, other=0).to(gl.int64)
    return ((block * KV_HEADS + head) * PAGE + token % PAGE) * DIM


@gluon.jit
def _load_keys(
    keys, table, start, stop, head,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, LA: gl.constexpr,
):  # fmt: skip
    token = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, LA))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LA))
    inside = token < stop
    row = _rows(table, token, inside, head, KV_HEADS, PAGE, DIM)
    return gl.load(keys + row[:, None] + channel[None, :], mask=inside[:, None], other=0.0)


@gluon.jit
def _load_values(
    values, table, start, stop, head, column,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, LV: gl.constexpr,
):  # fmt: skip
    token = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, LV))
    inside = token < stop
    row = _rows(table, token, inside, head, KV_HEADS, PAGE, DIM)
    return gl.load(values + row[:, None] + column[None, :], mask=inside[:, None], other=0.0)


@gluon.jit
def _products(tile, queries, TILE: gl.constexpr, MMA: gl.constexpr):
    return mma_v2(tile.to(queries.dtype), queries, gl.zeros((TILE, HEADS_OF_TILE), gl.float32, layout=MMA))


@gluon.jit
def _scores(
    product, new_score, start, old, stop, factor, soft_cap,
    HAS_SOFT_CAP: gl.constexpr, TILE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """``[TILE, 8]`` of a tile of keys; the key at ``old`` is the new one, from ``stop`` on there is none."""
    token = (start + gl.arange(0, TILE, layout=gl.SliceLayout(1, MMA)))[:, None]
    score = _capped(gl.where(token == old, new_score[None, :], product) * factor, soft_cap, HAS_SOFT_CAP)
    return gl.where(token < stop, score, float("-inf"))


@gluon.jit
def _new_values(place, of_value, dtype: gl.constexpr):
    """Of the step's own token, as the cache has them."""
    return (finite(gl.load(place).to(gl.float32)) / of_value).to(dtype)


@gluon.jit
def _weighted(weight, value, new_value, start, old, TILE: gl.constexpr, L3: gl.constexpr):
    """Values times their weights ``[TILE, GROUP]``: ``[TILE, GROUP, columns]``."""
    token = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, gl.SliceLayout(1, L3)))
    value = gl.where((token == old)[:, None], new_value[None, :], value).to(gl.float32)
    return gl.expand_dims(weight, 2) * gl.expand_dims(value, 1)


@gluon.jit
def _walk(
    keys, values, table, queries, new_score, value_row, begin, stop, old, head, first_column, factor, soft_cap,
    of_value, best, total, sums, room, peaks,
    HAS_SOFT_CAP: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
    GROUP: gl.constexpr, TILE: gl.constexpr, CHUNK: gl.constexpr,
    MMA: gl.constexpr, LA: gl.constexpr, L3: gl.constexpr,
):  # fmt: skip
    """Keys from ``begin`` to ``stop``, tile by tile, added to what is there already.

    ``sums`` are of CHUNK value columns each, from ``first_column`` on.
    """
    LG: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, L3))
    column = first_column + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    for start in range(begin, stop, TILE):
        last = gl.minimum(stop, old)
        tile = _load_keys(keys, table, start, last, head, KV_HEADS, PAGE, DIM, TILE, LA)
        token = start + gl.arange(0, TILE, layout=gl.SliceLayout(1, gl.SliceLayout(1, L3)))
        inside = token < last
        row = _rows(table, token, inside, head, KV_HEADS, PAGE, DIM)
        product = _products(tile, queries, TILE, MMA)
        score = _scores(product, new_score, start, old, stop, factor, soft_cap, HAS_SOFT_CAP, TILE, MMA)
        higher = gl.maximum(best, gl.max(score, 0))
        peaks.store(gl.exp2(best - higher))
        room.store(gl.exp2(score - higher[None, :]))
        shrink = peaks.slice(0, GROUP).load(LG)
        weight = room.slice(0, GROUP, dim=1).load(gl.SliceLayout(2, L3))
        total = total * shrink + gl.convert_layout(gl.sum(weight, 0), LG)
        added = ()
        for i in gl.static_range(len(sums)):
            place = values + gl.expand_dims(row + i * CHUNK, 1) + gl.expand_dims(column, 0)
            value = gl.load(place, mask=gl.expand_dims(inside, 1), other=0.0)
            fresh = _new_values(value_row + i * CHUNK + column, of_value, values.dtype.element_ty)
            weighted = _weighted(weight, value, fresh, start, old, TILE, L3)
            added = added + (sums[i] * gl.expand_dims(shrink, 1) + gl.sum(weighted, 0),)
        sums = added
        best = higher
    return best, total, sums


@gluon.jit
def _long(
    keys, values, table, queries, new_score, value_row, sinks, out, partial, stats, arrivals, first, length, old,
    seq, kv_head, part, factor, soft_cap, of_value, room, peaks,
    HAS_SINKS: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
    DIM: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, TILE: gl.constexpr, CHUNK: gl.constexpr,
    MMA: gl.constexpr, LA: gl.constexpr, LR: gl.constexpr, L3: gl.constexpr,
):  # fmt: skip
    """A part's share of the keys; the last part adds all shares up in their order."""
    LG: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, L3))
    LC: gl.constexpr = gl.SliceLayout(0, L3)
    share = gl.cdiv(gl.cdiv(length - first, PARTS), TILE) * TILE
    start = first + part * share
    stop = gl.minimum(start + share, length)
    sums = ()
    for _ in gl.static_range(DIM // CHUNK):
        sums = sums + (gl.zeros((GROUP, CHUNK), gl.float32, layout=LC),)
    best, total, sums = _walk(
        keys, values, table, queries, new_score, value_row, start, stop, old, kv_head, 0, factor, soft_cap, of_value,
        gl.full((HEADS_OF_TILE,), NEVER, gl.float32, layout=gl.SliceLayout(0, MMA)),
        gl.zeros((GROUP,), gl.float32, layout=LG), sums, room, peaks,
        HAS_SOFT_CAP, KV_HEADS, PAGE, DIM, GROUP, TILE, CHUNK, MMA, LA, L3,
    )  # fmt: skip
    peaks.store(best)
    member = gl.arange(0, GROUP, layout=LG)
    group = seq * KV_HEADS + kv_head
    base = group * PARTS * GROUP + member
    own = base + part * GROUP
    column = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LC)), 0)
    for i in gl.static_range(DIM // CHUNK):
        gl.store(partial + gl.expand_dims(own * DIM + i * CHUNK, 1) + column, sums[i])
    gl.store(stats + own * 2, peaks.slice(0, GROUP).load(LG))
    gl.store(stats + own * 2 + 1, total)
    debug_barrier()
    if gl.atomic_add(arrivals + group, 1, sem="acq_rel") == PARTS - 1:
        debug_barrier()
        entry = gl.arange(0, GROUP, layout=gl.SliceLayout(1, LR))
        channel = gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, LR)), 0)
        rows = group * PARTS * GROUP + entry
        peak = gl.load(stats + rows * 2, cache_modifier=".cg")
        for i in gl.static_range(1, PARTS):
            peak = gl.maximum(peak, gl.load(stats + (rows + i * GROUP) * 2, cache_modifier=".cg"))
        whole = gl.zeros((GROUP,), gl.float32, layout=gl.SliceLayout(1, LR))
        acc = gl.zeros((GROUP, DIM), gl.float32, layout=LR)
        for i in gl.static_range(PARTS):
            place = rows + i * GROUP
            weight = gl.exp2(gl.load(stats + place * 2, cache_modifier=".cg") - peak)
            whole += weight * gl.load(stats + place * 2 + 1, cache_modifier=".cg")
            added = gl.load(partial + gl.expand_dims(place * DIM, 1) + channel, cache_modifier=".cg")
            acc += gl.expand_dims(weight, 1) * added
        head = kv_head * GROUP + entry
        if HAS_SINKS:
            whole += gl.exp2(gl.load(sinks + head).to(gl.float32) * LOG2_E - peak)
        place = out + gl.expand_dims((seq * KV_HEADS * GROUP + head) * DIM, 1) + channel
        gl.store(place, (acc * of_value / gl.expand_dims(whole, 1)).to(out.dtype.element_ty))
        gl.store(arrivals + group, 0)


@gluon.jit
def grouped(
    qkv, keys, values, tables, rows, context_lens, slots, cos, sin, qk_norm, sinks, k_scale, v_scale, out, partial,
    stats, arrivals, scale, soft_cap, eps, table_stride, rope,
    HAS_ROWS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # a power of two, up to 8
    PAGE: gl.constexpr,
    DIM: gl.constexpr,  # 64 or 128
    ROTARY: gl.constexpr,
    ROTARY_PAD: gl.constexpr,
    ROPES: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,  # tiles loaded before the wait
    LONG: gl.constexpr,  # more keys than this are split over the parts
    ROWS: gl.constexpr,  # of the queries' tile: a power of two above GROUP
    NW: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = KV_HEADS * GROUP
    WIDTH: gl.constexpr = DIM // PARTS
    TILE: gl.constexpr = 16 * NW
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[NW, 1], instr_shape=[16, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)  # a thread reads 8 channels of a key at once
    LB: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    LR: gl.constexpr = gl.BlockedLayout([1, DIM // 32], [1, 32], [NW, 1], [1, 0])  # a head a warp
    # Values: several threads share a row, so that few steps add up what lies in other threads.
    VEC: gl.constexpr = max(2, min(8, WIDTH // 8))
    ACROSS: gl.constexpr = WIDTH // VEC
    L3: gl.constexpr = gl.BlockedLayout(
        [ACROSS // 2, GROUP, VEC], [32 // ACROSS, 1, ACROSS], [NW, 1, 1], [2, 1, 0]
    )
    LN: gl.constexpr = gl.BlockedLayout([8, GROUP, 2], [2, 1, 16], [NW, 1, 1], [2, 1, 0])  # 32 columns
    LV: gl.constexpr = gl.SliceLayout(1, L3)

    kv_head = gl.program_id(0)
    part = gl.program_id(1)
    seq = gl.program_id(2).to(gl.int64)
    length = gl.load(context_lens + seq)
    old = gl.maximum(length - 1, 0)
    first = 0
    if WINDOW > 0:
        first = gl.maximum(length - WINDOW, 0)
    table_row = seq
    if HAS_ROWS:
        table_row = gl.load(rows + seq)
    table = tables + table_row * table_stride
    is_long = old - first > LONG
    width = part * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LV))

    key_tiles = ()
    value_tiles = ()
    early = gl.where(is_long, first, old)
    for i in gl.static_range(AHEAD):
        start = first + i * TILE
        key_tiles = key_tiles + (
            _load_keys(keys, table, start, early, kv_head, KV_HEADS, PAGE, DIM, TILE, LA),
        )
        value_tiles = value_tiles + (
            _load_values(values, table, start, early, kv_head, width, KV_HEADS, PAGE, DIM, TILE, LV),
        )
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LR))
    is_key = (row >= GROUP)[:, None]
    source = (gl.where(row < GROUP, kv_head * GROUP + row, HEADS + kv_head) * DIM)[:, None]
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LR))
    angle = (seq * ROPES + rope) * ROTARY_PAD + channel
    if ROTARY == DIM:
        partner = (channel + DIM // 2) % DIM
        c = gl.load(cos + angle).to(gl.float32)
        s = gl.load(sin + angle).to(gl.float32)
    else:
        partner = gl.where(channel < ROTARY, (channel + ROTARY // 2) % ROTARY, channel)
        c = gl.load(cos + angle, mask=channel < ROTARY, other=1.0).to(gl.float32)
        s = gl.load(sin + angle, mask=channel < ROTARY, other=0.0).to(gl.float32)
    if HAS_NORM:
        norm_own = gl.load(qk_norm + source + channel[None, :])
        norm_other = gl.load(qk_norm + source + partner[None, :])
    of_key, of_value = 1.0, 1.0
    if HAS_SCALES:
        of_key, of_value = gl.load(k_scale), gl.load(v_scale)
    tile_of_queries = gl.allocate_shared_memory(
        qkv.dtype.element_ty, [16, DIM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    room = gl.allocate_shared_memory(gl.float32, [TILE, HEADS_OF_TILE], plain)
    peaks = gl.allocate_shared_memory(gl.float32, [HEADS_OF_TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token_row = qkv + seq * (HEADS + 2 * KV_HEADS) * DIM
    own = gl.load(token_row + source + channel[None, :]).to(gl.float32)
    other = gl.load(token_row + source + partner[None, :]).to(gl.float32)
    value_row = token_row + (HEADS + KV_HEADS + kv_head) * DIM
    new_value = _new_values(value_row + width, of_value, values.dtype.element_ty)
    # Here, where other loads are waited for: before the wait it would take registers.
    slot = gl.load(slots + seq)
    if HAS_NORM:
        norm = gl.expand_dims(gl.rsqrt(gl.sum(own * own, 1) / DIM + eps), 1)
        own = own * norm * norm_own.to(gl.float32)
        other = other * norm * norm_other.to(gl.float32)
    turned = own * c[None, :] + other * s[None, :]
    new_key = (finite(turned) / of_key).to(keys.dtype.element_ty)
    tile_of_queries.slice(0, ROWS).store(
        gl.where(is_key, new_key.to(qkv.dtype.element_ty), turned.to(qkv.dtype.element_ty))
    )
    queries = tile_of_queries.slice(0, HEADS_OF_TILE).permute((1, 0)).load(LB)
    products = ()
    for i in gl.static_range(
        AHEAD
    ):  # of long contexts too: a branch in between would keep these from overlapping
        products = products + (_products(key_tiles[i], queries, TILE, MMA),)
    of_new = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, MMA)) == GROUP, 1)
    new_score = gl.sum(gl.where(of_new, _products(tile_of_queries.load(LA), queries, 16, MMA), 0.0), 0)
    target = ((slot // PAGE) * KV_HEADS + kv_head) * PAGE * DIM + slot % PAGE * DIM
    writes = (slot >= 0) & (part == 0)
    gl.store(
        keys + target + gl.expand_dims(channel, 0) + gl.expand_dims(row * 0, 1), new_key,
        mask=((row == GROUP) & writes)[:, None],
    )  # fmt: skip
    gl.store(values + target + width, new_value, mask=(width >= 0) & (slot >= 0))
    factor = scale * of_key

    if not is_long:
        scores = ()
        highest = gl.full((TILE, HEADS_OF_TILE), NEVER, gl.float32, layout=MMA)
        for i in gl.static_range(AHEAD):
            start = first + i * TILE
            score = _scores(
                products[i], new_score, start, old, length, factor, soft_cap, HAS_SOFT_CAP, TILE, MMA
            )
            scores = scores + (score,)
            highest = gl.maximum(highest, score)
        best = gl.max(highest, 0)
        weights = gl.zeros((TILE, GROUP), gl.float32, layout=gl.SliceLayout(2, L3))
        summed = gl.zeros((TILE, GROUP, WIDTH), gl.float32, layout=L3)
        for i in gl.static_range(AHEAD):
            room.store(gl.exp2(scores[i] - best[None, :]))
            weight = room.slice(0, GROUP, dim=1).load(gl.SliceLayout(2, L3))
            weights += weight
            summed += _weighted(weight, value_tiles[i], new_value, first + i * TILE, old, TILE, L3)
        LG: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, L3))
        total = gl.convert_layout(gl.sum(weights, 0), LG)
        best, total, sums = _walk(
            keys, values, table, queries, new_score, value_row, first + AHEAD * TILE, length, old, kv_head,
            part * WIDTH, factor, soft_cap, of_value, best, total, (gl.sum(summed, 0),), room, peaks,
            HAS_SOFT_CAP, KV_HEADS, PAGE, DIM, GROUP, TILE, WIDTH, MMA, LA, L3,
        )  # fmt: skip
        head = kv_head * GROUP + gl.arange(0, GROUP, layout=LG)
        if HAS_SINKS:
            peaks.store(best)
            peak = peaks.slice(0, GROUP).load(LG)
            total += gl.exp2(gl.load(sinks + head).to(gl.float32) * LOG2_E - peak)
        result = gl.where(length > 0, sums[0] * of_value / gl.expand_dims(total, 1), 0.0)
        column = part * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(0, L3)))
        place = out + gl.expand_dims((seq * HEADS + head) * DIM, 1) + gl.expand_dims(column, 0)
        gl.store(place, result.to(out.dtype.element_ty))
    else:
        _long(
            keys, values, table, queries, new_score, value_row, sinks, out, partial, stats, arrivals, first, length,
            old, seq, kv_head, part, factor, soft_cap, of_value, room, peaks,
            HAS_SINKS, HAS_SOFT_CAP, KV_HEADS, PAGE, DIM, GROUP, PARTS, TILE, 32, MMA, LA, LR, LN,
        )  # fmt: skip
