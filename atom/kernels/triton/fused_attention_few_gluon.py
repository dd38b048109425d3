"""Attention of very few sequences for sm_90 in Gluon: small programs beside the products, warps that meet twice.

What ``fused_attention.columns`` does, in another arrangement. A program has one kv head with all its query heads and
a share of the value columns. Its keys and values are on their way to shared memory before the wait and take few
registers, so that it starts while the projection before it still runs, and lets the product behind it start beside
itself. A warp owns 16 keys of every tile and its own softmax. Behind the wait warps meet for the queries, each of
which one warp has normalised and rotated, and for their sums.

Keys and values are the operand of 16 rows, query heads the one of 8. The step's own key and value never pass through
the cache: its score is a product of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.attention_parts import LOG2_E, NEVER
from atom.kernels.triton.gluon_parts import copy, finite

N = gl.constexpr(8)  # query heads in a product
SHARE = gl.constexpr(16)  # keys of a warp in a tile


@gluon.jit
def _places(
    table, begin, first, stop, head,
    NW: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the keys ``[NW, SHARE]`` of the tile at ``begin`` lie in the cache, and which of them there are."""
    LINES: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LINES))
    index = gl.arange(0, SHARE, layout=gl.SliceLayout(0, LINES))
    of_warp = begin + warp * SHARE
    token = of_warp[:, None] + index[None, :]
    inside = (token >= first) & (token < stop)
    if SHARE <= PAGE:  # both powers of two: a warp's keys lie in one page
        block = gl.load(table + of_warp // PAGE, mask=of_warp < stop, other=0).to(gl.int64)
        of_page = ((block * KV_HEADS + head) * PAGE + of_warp % PAGE) * DIM
        row = of_page[:, None] + (index * DIM)[None, :]
    else:
        block = gl.load(table + token // PAGE, mask=inside, other=0).to(gl.int64)
        row = ((block * KV_HEADS + head) * PAGE + token % PAGE) * DIM
    return row, inside


@gluon.jit
def _send(source, slot, row, inside, first_channel, CHANNELS: gl.constexpr, LAYOUT: gl.constexpr):
    """Let CHANNELS of a tile's keys or values be copied to shared memory, zeros where there is none."""
    channel = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    place = source + row[:, :, None] + (first_channel + channel)[None, None, :]
    copy(slot, place, mask=inside[:, :, None] & (channel < CHANNELS)[None, None, :])


@gluon.jit
def _send_both(
    keys, values, key_slot, value_slot, table, begin, first, stop, head, first_channel,
    CHANNELS: gl.constexpr, NW: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
    OF_KEYS: gl.constexpr, OF_VALUES: gl.constexpr,
):  # fmt: skip
    """A tile's keys, and CHANNELS of its values, as a group of copies."""
    row, inside = _places(table, begin, first, stop, head, NW, KV_HEADS, PAGE, DIM, OF_KEYS)
    _send(keys, key_slot, row, inside, 0, DIM, OF_KEYS)
    row, inside = _places(table, begin, first, stop, head, NW, KV_HEADS, PAGE, DIM, OF_VALUES)
    _send(values, value_slot, row, inside, first_channel, CHANNELS, OF_VALUES)
    async_copy.commit_group()


@gluon.jit
def _capped(score, factor, soft_cap, HAS_SOFT_CAP: gl.constexpr):
    """Scores in units of log2, after the soft cap."""
    score = score * factor
    if HAS_SOFT_CAP:
        score = soft_cap * (1.0 - 2.0 / (gl.exp2(score / soft_cap * (2 * LOG2_E)) + 1.0))
    return score * LOG2_E


@gluon.jit
def _products(tile, queries, NW: gl.constexpr, MMA: gl.constexpr):
    return mma_v2(tile, queries, gl.zeros([NW, SHARE, N], gl.float32, MMA))


@gluon.jit
def _scores(
    product, begin, first, stop, factor, soft_cap,
    HAS_SOFT_CAP: gl.constexpr, NW: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """``[NW, SHARE, N]`` of a tile's products; below ``first`` and from ``stop`` on there is no key."""
    LINES: gl.constexpr = gl.SliceLayout(2, MMA)
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, LINES))
    index = gl.arange(0, SHARE, layout=gl.SliceLayout(0, LINES))
    token = begin + (warp * SHARE)[:, None] + index[None, :]
    visible = (token >= first) & (token < stop)
    return gl.where(visible[:, :, None], _capped(product, factor, soft_cap, HAS_SOFT_CAP), float("-inf"))


@gluon.jit
def _weighted(value_slot, weight, acc, MMA: gl.constexpr):
    """Values ``[NW, SHARE, channels]`` times their weights ``[NW, SHARE, N]``, on top of ``acc [NW, channels, N]``."""
    value = value_slot.permute([0, 2, 1]).load(gl.DotOperandLayout(0, MMA, 2))
    return mma_v2(value, gl.convert_layout(weight.to(value.dtype), gl.DotOperandLayout(1, MMA, 2)), acc)


@gluon.jit
def _take(
    key_slot, value_slot, queries, begin, first, stop, factor, soft_cap, best, total, acc,
    HAS_SOFT_CAP: gl.constexpr, NW: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Take a tile into every warp's softmax."""
    product = _products(key_slot.load(gl.DotOperandLayout(0, MMA, 2)), queries, NW, MMA)
    score = _scores(product, begin, first, stop, factor, soft_cap, HAS_SOFT_CAP, NW, MMA)
    higher = gl.maximum(best, gl.max(score, 1))
    weight = gl.exp2(score - higher[:, None, :])
    shrink = gl.exp2(best - higher)
    total = total * shrink + gl.sum(weight, 1)
    return higher, total, _weighted(value_slot, weight, acc * shrink[:, None, :], MMA)


@gluon.jit
def _meet(
    of_sums, best, total, acc,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, NW: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """What all warps have summed up, as one: maximum and sum of weights ``[GROUP]``, weighted sums ``[GROUP, WIDTH]``.

    ``of_sums [NW * N, WIDTH]`` is room for theirs.
    """
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    of_peaks = gl.allocate_shared_memory(gl.float32, [NW * N], LINE)
    of_totals = gl.allocate_shared_memory(gl.float32, [NW * N], LINE)
    of_sums.store(acc.permute(0, 2, 1).reshape([NW * N, WIDTH]))
    of_peaks.store(best.reshape([NW * N]))
    of_totals.store(total.reshape([NW * N]))
    peaks = ()
    totals = ()
    sums = ()
    for i in gl.static_range(NW):
        peaks = peaks + (of_peaks.slice(i * N, GROUP).load(gl.SliceLayout(1, LAYOUT)),)
        totals = totals + (of_totals.slice(i * N, GROUP).load(gl.SliceLayout(1, LAYOUT)),)
        sums = sums + (of_sums.slice(i * N, GROUP).load(LAYOUT),)
    peak = peaks[0]
    for i in gl.static_range(1, NW):
        peak = gl.maximum(peak, peaks[i])
    grow = gl.exp2(peaks[0] - peak)
    whole = totals[0] * grow
    summed = sums[0] * grow[:, None]
    for i in gl.static_range(1, NW):
        grow = gl.exp2(peaks[i] - peak)
        whole += totals[i] * grow
        summed += sums[i] * grow[:, None]
    return peak, whole, summed


@gluon.jit
def _store_result(
    out, sinks, peak, whole, summed, length, of_value, seq, kv_head, first_channel,
    HAS_SINKS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write the weighted sums ``[GROUP, WIDTH]`` of a group's heads over the sum of their weights."""
    head = kv_head * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(1, LAYOUT))
    channel = first_channel + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    if HAS_SINKS:
        whole += gl.exp2(gl.load(sinks + head).to(gl.float32) * LOG2_E - peak)
    result = gl.where(length > 0, summed * of_value / whole[:, None], 0.0)
    place = out + ((seq * HEADS + head) * DIM)[:, None] + channel[None, :]
    gl.store(place, result.to(out.dtype.element_ty))


@gluon.jit
def _add_shares(
    out, sinks, partial, stats, base, length, of_value, seq, kv_head,
    HAS_SINKS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add up what all parts of a group have stored, in their order; all is on its way before the first use."""
    row = base + gl.arange(0, GROUP, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    peaks = ()
    totals = ()
    sums = ()
    for i in gl.static_range(PARTS):
        place = row + i * GROUP
        peaks = peaks + (gl.load(stats + place * 2, cache_modifier=".cg"),)
        totals = totals + (gl.load(stats + place * 2 + 1, cache_modifier=".cg"),)
        sums = sums + (gl.load(partial + (place * DIM)[:, None] + channel[None, :], cache_modifier=".cg"),)
    peak = peaks[0]
    for i in gl.static_range(1, PARTS):
        peak = gl.maximum(peak, peaks[i])
    whole = gl.zeros_like(peak)
    summed = gl.zeros_like(sums[0])
    for i in gl.static_range(PARTS):
        grow = gl.exp2(peaks[i] - peak)
        whole += totals[i] * grow
        summed += sums[i] * grow[:, None]
    _store_result(
        out, sinks, peak, whole, summed, length, of_value, seq, kv_head, 0, HAS_SINKS, HEADS, GROUP, DIM, DIM, LAYOUT
    )  # fmt: skip


@gluon.jit
def _long(
    keys, values, table, queries, new_score, value_row, sinks, out, partial, stats, arrivals, tiles, first,
    start, share, stop, length, old, seq, kv_head, part, factor, soft_cap, of_value,
    HAS_SINKS: gl.constexpr, HAS_SOFT_CAP: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
    DIM: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, NW: gl.constexpr,
    MMA: gl.constexpr, OF_KEYS: gl.constexpr,
):  # fmt: skip
    """A part's share of the keys, whose first tiles are under way; the last part adds all shares up in their order."""
    TILE: gl.constexpr = SHARE * NW
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, NW], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    dtype: gl.constexpr = keys.dtype.element_ty
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(1, MMA)))
    has_new = ((warp == 0) & (old >= start) & (old < start + share))[:, None]
    every = gl.load(value_row + gl.arange(0, DIM, layout=OF_COLUMNS)).to(gl.float32)
    every = (finite(every) / of_value).to(dtype).to(gl.float32)
    best = gl.where(has_new, new_score, NEVER)
    total = gl.where(has_new, 1.0, gl.zeros_like(best))
    acc = total[:, None, :] * every[None, :, None]
    for turn in range(gl.cdiv(gl.maximum(stop - start, 0), TILE)):
        stage = turn % PAIRS * 2
        async_copy.wait_group(PAIRS - 1)
        begin = start + turn * TILE
        best, total, acc = _take(
            tiles.index(stage), tiles.index(stage + 1), queries, begin, first, stop, factor, soft_cap, best,
            total, acc, HAS_SOFT_CAP, NW, MMA,
        )  # fmt: skip
        _send_both(
            keys, values, tiles.index(stage), tiles.index(stage + 1), table, begin + PAIRS * TILE, first,
            stop, kv_head, 0, DIM, NW, KV_HEADS, PAGE, DIM, OF_KEYS, OF_KEYS,
        )  # fmt: skip
    async_copy.wait_group(0)
    room = tiles.index(0)._reinterpret(gl.float32, [NW * N, DIM], PLAIN)
    peak, whole, summed = _meet(room, best, total, acc, GROUP, DIM, NW, WIDE)
    group = seq * KV_HEADS + kv_head
    base = group * PARTS * GROUP
    place = base + part * GROUP + gl.arange(0, GROUP, layout=gl.SliceLayout(1, WIDE))
    wide = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    gl.store(partial + (place * DIM)[:, None] + wide[None, :], summed)
    gl.store(stats + place * 2, peak)
    gl.store(stats + place * 2 + 1, whole)
    debug_barrier()
    is_last = gl.atomic_add(arrivals + group, 1, sem="acq_rel") == PARTS - 1
    debug_barrier()
    if is_last:
        _add_shares(
            out, sinks, partial, stats, base, length, of_value, seq, kv_head, HAS_SINKS, KV_HEADS * GROUP, GROUP, DIM, PARTS,
            WIDE,
        )  # fmt: skip
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
    PARTS: gl.constexpr,  # of 16 value columns or more
    AHEAD: gl.constexpr,  # tiles in shared memory, 2 or more
    HELD: gl.constexpr,  # of them in registers while queries are under way
    LONG: gl.constexpr,  # more keys than this are split over the parts
    ROWS: gl.constexpr,  # 8, or 16 above GROUP
    NW: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    HEADS: gl.constexpr = KV_HEADS * GROUP
    WIDTH: gl.constexpr = DIM // PARTS
    TILE: gl.constexpr = SHARE * NW
    PAIRS: gl.constexpr = AHEAD // 2  # of long contexts, where whole values take a tile of keys' room
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OF_KEYS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // DIM, DIM // 8], [NW, 1, 1], [2, 1, 0])
    OF_VALUES: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // WIDTH, WIDTH // 8], [NW, 1, 1], [2, 1, 0]
    )
    ROW: gl.constexpr = gl.BlockedLayout([1, DIM // 32], [1, 32], [NW, 1], [1, 0])  # a head a warp
    FEW: gl.constexpr = gl.BlockedLayout([1, 1], [max(1, 32 // WIDTH), min(32, WIDTH)], [NW, 1], [1, 0])
    KEY_TILES: gl.constexpr = gl.SwizzledSharedLayout(
        8, max(1, 64 // DIM), DIM // 8 if DIM < 64 else 8, order=[2, 1, 0]
    )
    VALUE_TILES: gl.constexpr = gl.SwizzledSharedLayout(
        8, max(1, 64 // WIDTH), min(8, WIDTH // 8), order=[2, 1, 0]
    )
    dtype: gl.constexpr = keys.dtype.element_ty

    kv_head = gl.program_id(0)
    part = gl.program_id(1)
    seq = gl.program_id(2).to(gl.int64)
    # What no other load waits for is on its way first.
    length = gl.load(context_lens + seq)
    table_row = seq
    if HAS_ROWS:
        table_row = gl.load(rows + seq)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ROW))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROW))
    source = (gl.where(row < GROUP, kv_head * GROUP + row, HEADS + kv_head) * DIM)[:, None]
    angle = (seq * ROPES + rope) * ROTARY_PAD + channel
    if ROTARY == DIM:
        partner = (channel + DIM // 2) % DIM
        c = gl.load(cos + angle)
        s = gl.load(sin + angle)
    else:
        partner = gl.where(channel < ROTARY, (channel + ROTARY // 2) % ROTARY, channel)
        c = gl.load(cos + angle, mask=channel < ROTARY, other=1.0)
        s = gl.load(sin + angle, mask=channel < ROTARY, other=0.0)
    if HAS_NORM:
        norm_own = gl.load(qk_norm + source + channel[None, :])
        norm_other = gl.load(qk_norm + source + partner[None, :])
    of_key, of_value = 1.0, 1.0
    if HAS_SCALES:
        of_key, of_value = gl.load(k_scale), gl.load(v_scale)
    slot = gl.load(slots + seq)
    old = gl.maximum(length - 1, 0)
    first = 0
    origin = 0  # a warp's keys lie in one page
    if WINDOW > 0:
        first = gl.maximum(length - WINDOW, 0)
        origin = first // SHARE * SHARE
    table = tables + table_row * table_stride
    is_long = old - first > LONG
    share = gl.cdiv(gl.cdiv(length - origin, PARTS), SHARE) * SHARE
    start = origin + part * share
    stop = gl.minimum(start + share, old)
    key_tiles = gl.allocate_shared_memory(dtype, [AHEAD, NW, SHARE, DIM], KEY_TILES)
    value_tiles = gl.allocate_shared_memory(dtype, [AHEAD, NW, SHARE, WIDTH], VALUE_TILES)
    if is_long:
        for pair in gl.static_range(PAIRS):
            _send_both(
                keys, values, key_tiles.index(2 * pair), key_tiles.index(2 * pair + 1), table, start + pair * TILE, first, stop,
                kv_head, 0, DIM, NW, KV_HEADS, PAGE, DIM, OF_KEYS, OF_KEYS,
            )  # fmt: skip
    else:
        places = ()
        value_places = ()
        for i in gl.static_range(AHEAD):
            at = origin + i * TILE
            places = places + (_places(table, at, first, old, kv_head, NW, KV_HEADS, PAGE, DIM, OF_KEYS),)
            value_places = value_places + (
                _places(table, at, first, old, kv_head, NW, KV_HEADS, PAGE, DIM, OF_VALUES),
            )
        for i in gl.static_range(AHEAD):
            _send(keys, key_tiles.index(i), places[i][0], places[i][1], 0, DIM, OF_KEYS)
            _send(
                values,
                value_tiles.index(i),
                value_places[i][0],
                value_places[i][1],
                part * WIDTH,
                WIDTH,
                OF_VALUES,
            )
        async_copy.commit_group()
    if PDL:
        gdc_launch_dependents()
    held = ()
    if HELD > 0:
        async_copy.wait_group(0)
        for i in gl.static_range(HELD):
            held = held + (key_tiles.index(i).load(LEFT),)
    if PDL:
        gdc_wait()
    token_row = qkv + seq * (HEADS + 2 * KV_HEADS) * DIM
    own = gl.load(token_row + source + channel[None, :]).to(gl.float32)
    other = gl.load(token_row + source + partner[None, :]).to(gl.float32)
    value_row = token_row + (HEADS + KV_HEADS + kv_head) * DIM
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    new_value = gl.load(value_row + part * WIDTH + gl.arange(0, WIDTH, layout=OF_COLUMNS)).to(gl.float32)
    if HELD == 0:
        async_copy.wait_group(0)
    if HAS_NORM:
        shrunk = gl.rsqrt(gl.sum(own * own, 1) / DIM + eps)[:, None]
        own = own * shrunk * norm_own.to(gl.float32)
        other = other * shrunk * norm_other.to(gl.float32)
    turned = own * c.to(gl.float32)[None, :] + other * s.to(gl.float32)[None, :]
    new_key = (finite(turned) / of_key).to(dtype)
    pieces = gl.allocate_shared_memory(dtype, [16, DIM], gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0]))
    pieces.slice(0, ROWS).store(gl.where((row < GROUP)[:, None], turned.to(dtype), new_key))
    queries, _ = gl.broadcast(
        pieces.slice(0, N).permute([1, 0]).load(gl.SliceLayout(0, RIGHT))[None, :, :],
        gl.zeros([NW, DIM, N], dtype, RIGHT),
    )
    every_piece, _ = gl.broadcast(
        pieces.load(gl.SliceLayout(0, LEFT))[None, :, :], gl.zeros([NW, SHARE, DIM], dtype, LEFT)
    )
    factor = scale * of_key
    of_pieces = _products(every_piece, queries, NW, MMA)
    is_key = gl.arange(0, SHARE, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA))) == GROUP
    new_score = gl.max(gl.where(is_key[None, :, None], of_pieces, float("-inf")), 1)
    new_score = _capped(new_score, factor, soft_cap, HAS_SOFT_CAP)
    new_value = (finite(new_value) / of_value).to(dtype)
    target = ((slot // PAGE) * KV_HEADS + kv_head) * PAGE * DIM + slot % PAGE * DIM
    gl.store(
        keys + target + channel[None, :] + (row * 0)[:, None], new_key,
        mask=((row == GROUP) & (slot >= 0) & (part == 0))[:, None] & (channel >= 0)[None, :],
    )  # fmt: skip
    column = part * WIDTH + gl.arange(0, WIDTH, layout=OF_COLUMNS)
    gl.store(values + target + column, new_value, mask=(column >= 0) & (slot >= 0))
    warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(1, MMA)))

    if not is_long:
        has_new = ((warp == 0) & (length > 0))[:, None]
        scores = ()
        highest = gl.full([NW, SHARE, N], NEVER, gl.float32, MMA)
        for ahead in gl.static_range(AHEAD):
            if ahead < HELD:
                tile = held[ahead]
            else:
                tile = key_tiles.index(ahead).load(LEFT)
            score = _scores(
                _products(tile, queries, NW, MMA), origin + ahead * TILE, first, old, factor, soft_cap, HAS_SOFT_CAP,
                NW, MMA,
            )  # fmt: skip
            scores = scores + (score,)
            highest = gl.maximum(highest, score)
        best = gl.maximum(gl.max(highest, 1), gl.where(has_new, new_score, NEVER))
        of_new = gl.where(has_new, gl.exp2(new_score - best), 0.0)
        acc = of_new[:, None, :] * new_value.to(gl.float32)[None, :, None]
        weights = gl.zeros([NW, SHARE, N], gl.float32, MMA)
        for ahead in gl.static_range(AHEAD):
            weight = gl.exp2(scores[ahead] - best[:, None, :])
            weights += weight
            acc = _weighted(value_tiles.index(ahead), weight, acc, MMA)
        total = gl.sum(weights, 1) + of_new
        for at in range(origin + AHEAD * TILE, old, TILE):  # one after the other: few contexts are so long
            _send_both(
                keys, values, key_tiles.index(0), value_tiles.index(0), table, at, first, old, kv_head, part * WIDTH,
                WIDTH, NW, KV_HEADS, PAGE, DIM, OF_KEYS, OF_VALUES,
            )  # fmt: skip
            async_copy.wait_group(0)
            best, total, acc = _take(
                key_tiles.index(0), value_tiles.index(0), queries, at, first, old, factor, soft_cap, best, total, acc,
                HAS_SOFT_CAP, NW, MMA,
            )  # fmt: skip
        room = gl.allocate_shared_memory(
            gl.float32, [NW * N, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
        )
        peak, whole, summed = _meet(room, best, total, acc, GROUP, WIDTH, NW, FEW)
        _store_result(
            out, sinks, peak, whole, summed, length, of_value, seq, kv_head, part * WIDTH,
            HAS_SINKS, HEADS, GROUP, DIM, WIDTH, FEW,
        )  # fmt: skip
    else:
        _long(
            keys, values, table, queries, new_score, value_row, sinks, out, partial, stats, arrivals, key_tiles, first,
            start, share, stop, length, old, seq, kv_head, part, factor, soft_cap, of_value,
            HAS_SINKS, HAS_SOFT_CAP, KV_HEADS, PAGE, DIM, GROUP, PARTS, PAIRS, NW, MMA, OF_KEYS,
        )  # fmt: skip
    # What is apart in memory needs no barrier.
    pieces._keep_alive()
    key_tiles._keep_alive()
    value_tiles._keep_alive()
