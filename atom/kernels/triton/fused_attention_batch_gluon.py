"""Attention of a decode step's batches for sm_90 in Gluon, beside ``fused_attention.splits``: the same work.

A program has one kv head of one sequence and a share of its keys. Its first tiles are on their way to shared memory
before the wait, as many as there are stages; nothing of them sits in registers, so that programs fit beside those of
the projection that still runs. A warp owns its keys of every tile and its own softmax: warps meet once, at the end.
Keys and values are the operand of 16 rows, query heads the one of 8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.attention_parts import LOG2_E, NEVER
from atom.kernels.triton.gluon_parts import copy, finite


@gluon.jit
def _rows_of(
    table, begin, first, stop, head,
    WARPS: gl.constexpr, SHARE: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the keys ``[WARPS, SHARE]`` of the tile at ``begin`` lie in the cache, and which of them there are."""
    LINES: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LINES))
    index = gl.arange(0, SHARE, layout=gl.SliceLayout(0, LINES))
    of_warp = begin + warp * SHARE
    token = of_warp[:, None] + index[None, :]
    inside = (token >= first) & (token < stop)
    if PAGE % SHARE == 0:  # a warp's keys lie in one page
        block = gl.load(table + of_warp // PAGE, mask=of_warp < stop, other=0).to(gl.int64)
        of_page = ((block * KV_HEADS + head) * PAGE + of_warp % PAGE) * DIM
        row = of_page[:, None] + (index * DIM)[None, :]
    else:
        block = gl.load(table + token // PAGE, mask=inside, other=0).to(gl.int64)
        row = ((block * KV_HEADS + head) * PAGE + token % PAGE) * DIM
    return row, inside


@gluon.jit
def _send(keys, values, key_slot, value_slot, row, inside, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Let a tile be copied to shared memory, zeros where there is no key."""
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    place = row[:, :, None] + channel[None, None, :]
    mask = inside[:, :, None] & (channel < DIM)[None, None, :]
    copy(key_slot, keys + place, mask=mask)
    copy(value_slot, values + place, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _scaled(score, scale, soft_cap, HAS_SOFT_CAP: gl.constexpr):
    """Scores in units of log2, after the soft cap."""
    if HAS_SOFT_CAP:
        score = score * scale
        score = soft_cap * (1.0 - 2.0 / (gl.exp(2.0 * score / soft_cap) + 1.0)) * LOG2_E
    else:
        score = score * (scale * LOG2_E)
    return score


@gluon.jit
def _store_result(
    out, sinks, acc, best, total, length, token, kv_head,
    HAS_SINKS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write what the heads ``[members, DIM]`` of a group have summed up, over the sum of their weights."""
    MEMBERS: gl.constexpr = acc.shape[0]
    member = gl.arange(0, MEMBERS, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    head = kv_head * GROUP + member
    if HAS_SINKS:
        sink = gl.load(sinks + head, mask=member < GROUP, other=0.0).to(gl.float32) * LOG2_E
        total += gl.exp2(gl.where(length > 0, sink - best, NEVER))
    result = acc / gl.where(total > 0.0, total, 1.0)[:, None]
    place = out + (token * HEADS + head)[:, None] * DIM + channel[None, :]
    gl.store(place, result.to(out.dtype.element_ty), mask=(member < GROUP)[:, None])


@gluon.jit
def _add_up(peaks, totals, sums, COUNT: gl.constexpr):
    """Tuples of maxima ``[members]``, sums of weights ``[members]`` and weighted sums ``[members, DIM]`` as one."""
    best = peaks[0]
    for i in gl.static_range(1, COUNT):
        best = gl.maximum(best, peaks[i])
    grow = gl.exp2(peaks[0] - best)
    total = totals[0] * grow
    acc = sums[0] * grow[:, None]
    for i in gl.static_range(1, COUNT):
        grow = gl.exp2(peaks[i] - best)
        total += totals[i] * grow
        acc += sums[i] * grow[:, None]
    return best, total, acc


@gluon.jit
def _add_shares(
    out, sinks, partial, stats, base, num_active, length, token, kv_head,
    HAS_SINKS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, MEMBERS: gl.constexpr, DIM: gl.constexpr,
    SPLITS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add up what all splits of a group have stored, in their order; everything is loaded before the first use."""
    member = gl.arange(0, MEMBERS, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    peaks = ()
    totals = ()
    sums = ()
    for i in gl.static_range(SPLITS):
        at = base + i * GROUP + member
        mask = (member < GROUP) & (at < base + num_active * GROUP)
        place = partial + at[:, None] * DIM + channel[None, :]
        peaks = peaks + (gl.load(stats + at * 2, mask=mask, other=NEVER, cache_modifier=".cg"),)
        totals = totals + (gl.load(stats + at * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg"),)
        sums = sums + (gl.load(place, mask=mask[:, None], other=0.0, cache_modifier=".cg"),)
    best, total, acc = _add_up(peaks, totals, sums, SPLITS)
    _store_result(out, sinks, acc, best, total, length, token, kv_head, HAS_SINKS, HEADS, GROUP, DIM, LAYOUT)


@gluon.jit
def warp_splits(
    qkv,
    keys,
    values,
    tables,
    rows,
    context_lens,
    slots,
    cos,
    sin,
    qk_norm,
    sinks,
    out,
    partial,
    stats,
    arrivals,
    scale,
    soft_cap,
    eps,
    table_stride,
    rope,
    HAS_ROWS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    WINDOW: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    MEMBERS: gl.constexpr,  # GROUP, a power of two
    N: gl.constexpr,  # GROUP as columns of a product: 8 or more
    PIECES: gl.constexpr,  # the group's heads, their key and their value, a power of two
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
    ROTARY: gl.constexpr,
    ROTARY_PAD: gl.constexpr,
    ROPES: gl.constexpr,
    SPLITS: gl.constexpr,
    SHARE: gl.constexpr,  # keys of a warp in a tile
    STAGES: gl.constexpr,
    NW: gl.constexpr,
    PDL: gl.constexpr,
):
    """As ``splits`` for a cache of the projection's dtype."""
    HEADS: gl.constexpr = KV_HEADS * GROUP
    TILE: gl.constexpr = NW * SHARE
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // DIM, DIM // 8], [NW, 1, 1], [2, 1, 0])
    PER: gl.constexpr = max(1, DIM // 32)
    ROW: gl.constexpr = gl.BlockedLayout([1, PER], [32 * PER // DIM, DIM // PER], [NW, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, NW], [1, 0])
    TILES: gl.constexpr = gl.SwizzledSharedLayout(8, max(1, 64 // DIM), min(8, DIM // 8), order=[2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    dtype: gl.constexpr = keys.dtype.element_ty

    kv_head = gl.program_id(0)
    seq = gl.program_id(1).to(gl.int64)
    split = gl.program_id(2)
    # What no other load waits for is on its way first.
    length = gl.load(context_lens + seq)
    table_row = seq
    if HAS_ROWS:
        table_row = gl.load(rows + seq)
    piece = gl.arange(0, PIECES, layout=gl.SliceLayout(1, ROW))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROW))
    partner = gl.where(channel < ROTARY, (channel + ROTARY // 2) % ROTARY, channel)
    key_row = HEADS + kv_head
    of_piece = gl.where(piece < GROUP, kv_head * GROUP + piece, key_row)
    angle = (seq * ROPES + rope) * ROTARY_PAD + channel
    c = gl.load(cos + angle, mask=channel < ROTARY, other=1.0).to(gl.float32)
    s = gl.load(sin + angle, mask=channel < ROTARY, other=0.0).to(gl.float32)
    slot = gl.load(slots + seq)
    if HAS_NORM:
        norm = gl.load(qk_norm + of_piece[:, None] * DIM + channel[None, :])
        norm_other = gl.load(qk_norm + of_piece[:, None] * DIM + partner[None, :])
    old = gl.maximum(length - 1, 0)
    first = 0
    origin = 0
    if WINDOW > 0:
        first = gl.maximum(length - WINDOW, 0)
        origin = first // SHARE * SHARE
    part = gl.maximum(gl.cdiv(gl.cdiv(length - origin, SPLITS), SHARE), 1) * SHARE
    start = origin + split * part
    stop = gl.minimum(start + part, old)
    table = tables + table_row * table_stride
    tile_rows = ()
    insides = ()
    for ahead in gl.static_range(STAGES):
        row, inside = _rows_of(
            table, start + ahead * TILE, first, stop, kv_head, NW, SHARE, KV_HEADS, PAGE, DIM, COPY
        )
        tile_rows = tile_rows + (row,)
        insides = insides + (inside,)
    key_tiles = gl.allocate_shared_memory(dtype, [STAGES, NW, SHARE, DIM], TILES)
    value_tiles = gl.allocate_shared_memory(dtype, [STAGES, NW, SHARE, DIM], TILES)
    for ahead in gl.static_range(STAGES):
        _send(
            keys, values, key_tiles.index(ahead), value_tiles.index(ahead), tile_rows[ahead], insides[ahead], DIM,
            COPY,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (split == 0) | (start < length):
        # The group's queries, the new key and the new value are rows of one tensor.
        from_row = qkv + seq * (HEADS + 2 * KV_HEADS) * DIM
        from_row += (gl.where(piece > GROUP, key_row + KV_HEADS, of_piece) * DIM)[:, None]
        own = gl.load(from_row + channel[None, :]).to(gl.float32)
        other = gl.load(from_row + partner[None, :]).to(gl.float32)
        turned = own
        if HAS_NORM:
            shrunk = gl.rsqrt(gl.sum(own * own, 1) / DIM + eps)[:, None]
            turned = own * shrunk * norm.to(gl.float32)
            other = other * shrunk * norm_other.to(gl.float32)
        turned = turned * c[None, :] + other * s[None, :]
        is_query = (piece < GROUP)[:, None]
        turned = gl.where((piece > GROUP)[:, None], own, turned)
        pieces = gl.where(is_query, turned, finite(turned)).to(dtype)
        is_owner = (length > start) & (old < start + part)  # of the step's own token
        if is_owner & (slot >= 0):
            target = (((slot // PAGE) * KV_HEADS + kv_head) * PAGE + slot % PAGE) * DIM + channel
            target = target[None, :] + (piece * 0)[:, None]
            gl.store(keys + target, pieces, mask=(piece == GROUP)[:, None] & (channel >= 0)[None, :])
            gl.store(values + target, pieces, mask=(piece == GROUP + 1)[:, None] & (channel >= 0)[None, :])
        shared = gl.allocate_shared_memory(dtype, [max(N, PIECES), DIM], PLAIN)
        shared.slice(0, PIECES).store(pieces)
        q = shared.slice(0, N).permute([1, 0]).load(gl.SliceLayout(0, RIGHT))
        key = shared.slice(GROUP, 1).permute([1, 0]).load(gl.SliceLayout(0, RIGHT))
        value = shared.slice(GROUP + 1, 1).permute([1, 0]).load(gl.SliceLayout(0, MMA))
        score = gl.sum(q.to(gl.float32) * key.to(gl.float32), 0)
        score = gl.convert_layout(score, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
        score = _scaled(score, scale, soft_cap, HAS_SOFT_CAP)
        warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(1, MMA)))
        has_new = ((warp == 0) & is_owner)[:, None]
        best = gl.where(has_new, score[None, :], NEVER)
        total = gl.where(has_new, 1.0, gl.zeros_like(best))
        zeros = gl.zeros([NW, DIM, N], gl.float32, MMA)
        acc = gl.where(has_new[:, None, :], value.to(gl.float32)[None, :, :] + zeros, 0.0)
        q, _ = gl.broadcast(q[None, :, :], gl.zeros([NW, DIM, N], dtype, RIGHT))
        of_warp = gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA))) * SHARE
        index = gl.arange(0, SHARE, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        within = of_warp[:, None] + index[None, :]
        for i in range(gl.cdiv(gl.maximum(stop - start, 0), TILE)):
            stage = i % STAGES
            async_copy.wait_group(STAGES - 1)
            scores = gl.zeros([NW, SHARE, N], gl.float32, MMA)
            scores = mma_v2(key_tiles.index(stage).load(LEFT), q, scores)
            scores = _scaled(scores, scale, soft_cap, HAS_SOFT_CAP)
            token = start + i * TILE + within
            visible = (token >= first) & (token < stop)
            scores = gl.where(visible[:, :, None], scores, float("-inf"))
            higher = gl.maximum(best, gl.max(scores, 1))
            weight = gl.exp2(scores - higher[:, None, :])
            shrink = gl.exp2(best - higher)
            total = total * shrink + gl.sum(weight, 1)
            tile = value_tiles.index(stage).permute([0, 2, 1]).load(LEFT)
            acc = mma_v2(tile, gl.convert_layout(weight.to(dtype), RIGHT), acc * shrink[:, None, :])
            best = higher
            tile_row, is_there = _rows_of(
                table, start + (i + STAGES) * TILE, first, stop, kv_head, NW, SHARE, KV_HEADS, PAGE, DIM, COPY
            )
            _send(
                keys, values, key_tiles.index(stage), value_tiles.index(stage), tile_row, is_there, DIM, COPY
            )
        async_copy.wait_group(0)
        # Every warp's sums, then a thread adds up some columns of theirs.
        of_sums = gl.allocate_shared_memory(gl.float32, [NW * N, DIM], PLAIN)
        of_peaks = gl.allocate_shared_memory(gl.float32, [NW * N], LINE)
        of_totals = gl.allocate_shared_memory(gl.float32, [NW * N], LINE)
        of_sums.store(acc.permute(0, 2, 1).reshape([NW * N, DIM]))
        of_peaks.store(best.reshape([NW * N]))
        of_totals.store(total.reshape([NW * N]))
        peaks = ()
        totals = ()
        sums = ()
        for other_warp in gl.static_range(NW):
            peaks = peaks + (of_peaks.slice(other_warp * N, MEMBERS).load(gl.SliceLayout(1, WIDE)),)
            totals = totals + (of_totals.slice(other_warp * N, MEMBERS).load(gl.SliceLayout(1, WIDE)),)
            sums = sums + (of_sums.slice(other_warp * N, MEMBERS).load(WIDE),)
        peak, whole, summed = _add_up(peaks, totals, sums, NW)
        if length - origin <= part:
            _store_result(
                out, sinks, summed, peak, whole, length, seq, kv_head, HAS_SINKS, HEADS, GROUP, DIM, WIDE
            )
        else:
            num_active = gl.cdiv(length - origin, part)
            group = seq * KV_HEADS + kv_head
            base = group * SPLITS * GROUP
            member = gl.arange(0, MEMBERS, layout=gl.SliceLayout(1, WIDE))
            wide = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
            own_place = base + split * GROUP + member
            is_head = member < GROUP
            gl.store(partial + own_place[:, None] * DIM + wide[None, :], summed, mask=is_head[:, None])
            gl.store(stats + own_place * 2, peak, mask=is_head)
            gl.store(stats + own_place * 2 + 1, whole, mask=is_head)
            debug_barrier()
            is_last = gl.atomic_add(arrivals + group, 1, sem="acq_rel") == num_active - 1
            debug_barrier()
            if is_last:
                _add_shares(
                    out, sinks, partial, stats, base, num_active, length, seq, kv_head,
                    HAS_SINKS, HEADS, GROUP, MEMBERS, DIM, SPLITS, WIDE,
                )  # fmt: skip
                gl.store(arrivals + group, 0)
