"""Attention of a decode step from the packed projection: q/k norm, rotation, cache write and attention in one launch.

The step's own key and value are taken from the projection; only keys of earlier steps are read from the cache, so
that the first of them can be loaded before the wait for the projection.

``columns`` serves very few sequences: the programs of a query head score all keys and sum their share of the value
columns, nothing is combined; long contexts are split over the same programs by keys. ``splits`` serves batches: a
program has one kv head with all its query heads and a share of the keys; the last one adds the shares up in their
order. On sm_90 ``fused_attention_few_gluon`` and ``fused_attention_batch_gluon`` do their work.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from atom.kernels.triton.attention_parts import LOG2_E, NEVER, add_shares, arrive
from atom.kernels.triton.decode_parts import finite
from atom.kernels.triton.kv_cache import stored


@triton.jit
def _capped(score, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """Scores in units of log2, after the soft cap."""
    if HAS_SOFT_CAP:
        score = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * score / soft_cap) + 1.0))
    return score * LOG2_E


@triton.jit
def _partner(channel, ROTARY: tl.constexpr):
    """The channel that a channel is rotated with; itself where it is not rotated."""
    return tl.where(channel < ROTARY, (channel + ROTARY // 2) % ROTARY, channel)


@triton.jit
def _rotation(
    table, seq, rope, channel, ROPES: tl.constexpr, ROTARY_PAD: tl.constexpr, ROTARY: tl.constexpr, rest
):
    """cos or sin by channel; ``rest`` for the channels that are not rotated."""
    place = table + (seq * ROPES + rope) * ROTARY_PAD + channel
    return tl.load(place, mask=channel < ROTARY, other=rest).to(tl.float32)


@triton.jit
def _block_rows(table, token, mask, head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Where the keys of ``token`` begin in the cache."""
    block = tl.load(table + token // PAGE, mask=mask, other=0).to(tl.int64)
    return ((block * KV_HEADS + head) * PAGE + token % PAGE) * DIM


@triton.jit
def _turned(own, other, of_own, of_other, cos, sin, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """A head of a token's projection and its partners, normalised (``of_own``, ``of_other``) and rotated."""
    own = own.to(tl.float32)
    other = other.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(own * own, 0) / DIM + eps)
        own = own * scale * of_own.to(tl.float32)
        other = other * scale * of_other.to(tl.float32)
    return own * cos + other * sin


@triton.jit
def _slot_row(slots, seq, head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr):
    slot = tl.load(slots + seq)
    return slot, (((slot // PAGE) * KV_HEADS + head) * PAGE + slot % PAGE) * DIM


@triton.jit
def _add_keys(q, tile, value, visible, best, total, acc, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """One step of the online softmax of one head: ``q [DIM]``, ``tile [TILE, DIM]``, ``value [TILE, width]``."""
    score = _capped(tl.sum(tile.to(tl.float32) * q[None, :], 1), soft_cap, HAS_SOFT_CAP)
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(best, tl.max(score, 0))
    shrink = tl.exp2(best - higher)
    weight = tl.exp2(score - higher)
    total = total * shrink + tl.sum(weight, 0)
    acc = acc * shrink + tl.sum(weight[:, None] * value.to(tl.float32), 0)
    return higher, total, acc


@triton.jit
def columns(
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
    k_scale,
    v_scale,
    out,
    partial,
    stats,
    arrivals,
    scale,
    soft_cap,
    eps,
    table_stride,
    rope,
    HAS_ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    ROPES: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,  # tiles loaded before the wait
    LONG: tl.constexpr,  # more keys than this are split over the parts
    PDL: tl.constexpr,
):
    HEADS: tl.constexpr = KV_HEADS * GROUP
    WIDTH: tl.constexpr = DIM // PARTS
    head = tl.program_id(0)
    part = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    kv_head = head // GROUP
    length = tl.load(context_lens + seq)
    old = tl.maximum(length - 1, 0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    table_row = seq
    if HAS_ROWS:
        table_row = tl.load(rows + seq)
    table = tables + table_row * table_stride
    channel = tl.arange(0, DIM)
    partner = _partner(channel, ROTARY)
    width = part * WIDTH + tl.arange(0, WIDTH)
    index = tl.arange(0, TILE)
    is_long = old - first > LONG

    key_tiles = ()
    value_tiles = ()
    for i in tl.static_range(AHEAD):
        token = first + i * TILE + index
        inside = (token < old) & (not is_long)
        row = _block_rows(table, token, inside, kv_head, KV_HEADS, PAGE, DIM)
        key_tiles = key_tiles + (
            tl.load(keys + row[:, None] + channel[None, :], mask=inside[:, None], other=0.0),
        )
        value_tiles = value_tiles + (
            tl.load(values + row[:, None] + width[None, :], mask=inside[:, None], other=0.0),
        )
    c = _rotation(cos, seq, rope, channel, ROPES, ROTARY_PAD, ROTARY, 1.0)
    s = _rotation(sin, seq, rope, channel, ROPES, ROTARY_PAD, ROTARY, 0.0)
    slot, target = _slot_row(slots, seq, kv_head, KV_HEADS, PAGE, DIM)
    of_key, of_value = 1.0, 1.0
    if HAS_SCALES:
        of_key, of_value = tl.load(k_scale), tl.load(v_scale)
    at = HEADS + kv_head
    q_norm, q_norm_other, k_norm, k_norm_other = 1.0, 1.0, 1.0, 1.0
    if HAS_NORM:
        q_norm = tl.load(qk_norm + head * DIM + channel)
        q_norm_other = tl.load(qk_norm + head * DIM + partner)
        k_norm = tl.load(qk_norm + at * DIM + channel)
        k_norm_other = tl.load(qk_norm + at * DIM + partner)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token_row = qkv + seq * (HEADS + 2 * KV_HEADS) * DIM
    q_own = tl.load(token_row + head * DIM + channel)
    q_other = tl.load(token_row + head * DIM + partner)
    new_own = tl.load(token_row + at * DIM + channel)
    new_other = tl.load(token_row + at * DIM + partner)
    value_row = token_row + (at + KV_HEADS) * DIM
    new_value = finite(tl.load(value_row + width).to(tl.float32))
    q = _turned(q_own, q_other, q_norm, q_norm_other, c, s, eps, DIM, HAS_NORM)
    new_key = _turned(new_own, new_other, k_norm, k_norm_other, c, s, eps, DIM, HAS_NORM)
    stored_key = stored(finite(new_key) / of_key, keys.dtype.element_ty)
    stored_value = stored(new_value / of_value, values.dtype.element_ty)
    if (head % GROUP == 0) & (slot >= 0):
        tl.store(values + target + width, stored_value)
        if part == 0:
            tl.store(keys + target + channel, stored_key)
    q = q * (scale * of_key)
    new_score = _capped(tl.sum(q * stored_key.to(tl.float32), 0), soft_cap, HAS_SOFT_CAP)
    place = out + (seq * HEADS + head) * DIM

    if not is_long:
        best = new_score
        scores = ()
        highest = tl.full((TILE,), float("-inf"), tl.float32)
        for i in tl.static_range(AHEAD):
            score = tl.sum(key_tiles[i].to(tl.float32) * q[None, :], 1)
            score = _capped(score, soft_cap, HAS_SOFT_CAP)
            score = tl.where(first + i * TILE + index < old, score, float("-inf"))
            scores = scores + (score,)
            highest = tl.maximum(highest, score)
        best = tl.maximum(best, tl.max(highest, 0))
        weights = tl.zeros((TILE,), tl.float32)
        summed = tl.zeros((TILE, WIDTH), tl.float32)
        for i in tl.static_range(AHEAD):
            weight = tl.exp2(scores[i] - best)
            weights += weight
            summed += weight[:, None] * value_tiles[i].to(tl.float32)
        own = tl.exp2(new_score - best)
        total = own + tl.sum(weights, 0)
        acc = tl.sum(summed, 0) + own * stored_value.to(tl.float32)
        for start in range(first + AHEAD * TILE, old, TILE):
            token = start + index
            inside = token < old
            row = _block_rows(table, token, inside, kv_head, KV_HEADS, PAGE, DIM)
            tile = tl.load(keys + row[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
            value = tl.load(values + row[:, None] + width[None, :], mask=inside[:, None], other=0.0)
            best, total, acc = _add_keys(q, tile, value, inside, best, total, acc, soft_cap, HAS_SOFT_CAP)
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - best)
        result = acc * of_value / total
        tl.store(place + width, tl.where(length > 0, result, 0.0).to(out.dtype.element_ty))
    else:
        share = tl.cdiv(tl.cdiv(old - first, PARTS), TILE) * TILE
        start = first + part * share
        stop = tl.minimum(start + share, old)
        best = tl.where(part == 0, new_score, NEVER)
        total = tl.where(part == 0, 1.0, 0.0)
        own_value = finite(tl.load(value_row + channel).to(tl.float32)) / of_value
        wide = total * stored(own_value, values.dtype.element_ty).to(tl.float32)
        for begin in range(start, stop, TILE):
            token = begin + index
            inside = token < stop
            row = _block_rows(table, token, inside, kv_head, KV_HEADS, PAGE, DIM)
            tile = tl.load(keys + row[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
            value = tl.load(values + row[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
            best, total, wide = _add_keys(q, tile, value, inside, best, total, wide, soft_cap, HAS_SOFT_CAP)
        base = (seq * HEADS + head) * PARTS
        tl.store(partial + (base + part) * DIM + channel, wide)
        tl.store(stats + (base + part) * 2, best)
        tl.store(stats + (base + part) * 2 + 1, total)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + seq * HEADS + head, 1, sem="acq_rel") == PARTS - 1:
            tl.debug_barrier()
            best = tl.load(stats + base * 2, cache_modifier=".cg")
            for i in tl.static_range(1, PARTS):
                best = tl.maximum(best, tl.load(stats + (base + i) * 2, cache_modifier=".cg"))
            total = 0.0
            wide = tl.zeros((DIM,), tl.float32)
            for i in tl.static_range(PARTS):
                weight = tl.exp2(tl.load(stats + (base + i) * 2, cache_modifier=".cg") - best)
                total += weight * tl.load(stats + (base + i) * 2 + 1, cache_modifier=".cg")
                wide += weight * tl.load(partial + (base + i) * DIM + channel, cache_modifier=".cg")
            if HAS_SINKS:
                total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - best)
            tl.store(place + channel, (wide * of_value / total).to(out.dtype.element_ty))
            tl.store(arrivals + seq * HEADS + head, 0)


@triton.jit
def _add_tile(q, tile, value, visible, best, total, acc, factor, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """One step of the online softmax: ``q [M, DIM]``, ``tile [DIM, TILE]``, ``value [TILE, DIM]``."""
    score = tl.dot(q, tile.to(q.dtype), input_precision="ieee") * factor
    score = tl.where(visible[None, :], _capped(score, soft_cap, HAS_SOFT_CAP), float("-inf"))
    higher = tl.maximum(best, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(q.dtype), value.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def splits(
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
    k_scale,
    v_scale,
    out,
    partial,
    stats,
    arrivals,
    scale,
    soft_cap,
    eps,
    table_stride,
    rope,
    HAS_ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PAD: tl.constexpr,
    ROPES: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(context_lens + seq)
    old = tl.maximum(length - 1, 0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(length - first, SPLITS), TILE), 1) * TILE
    num_active = tl.maximum(tl.cdiv(length - first, share), 1)
    start = first + split * share
    stop = tl.minimum(start + share, old)
    table_row = seq
    if HAS_ROWS:
        table_row = tl.load(rows + seq)
    table = tables + table_row * table_stride
    channel = tl.arange(0, DIM)
    partner = _partner(channel, ROTARY)
    index = tl.arange(0, TILE)
    member = tl.arange(0, GROUP_PAD)
    q_head = kv_head * GROUP + tl.minimum(member, GROUP - 1)

    token = start + index
    inside = token < stop
    row = _block_rows(table, token, inside, kv_head, KV_HEADS, PAGE, DIM)
    tile = tl.load(keys + row[None, :] + channel[:, None], mask=inside[None, :], other=0.0)
    value = tl.load(values + row[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
    c = _rotation(cos, seq, rope, channel, ROPES, ROTARY_PAD, ROTARY, 1.0)
    s = _rotation(sin, seq, rope, channel, ROPES, ROTARY_PAD, ROTARY, 0.0)
    slot, target = _slot_row(slots, seq, kv_head, KV_HEADS, PAGE, DIM)
    of_key, of_value = 1.0, 1.0
    if HAS_SCALES:
        of_key, of_value = tl.load(k_scale), tl.load(v_scale)
    at = HEADS + kv_head
    q_norm, q_norm_other, k_norm, k_norm_other = 1.0, 1.0, 1.0, 1.0
    if HAS_NORM:
        q_norm = tl.load(qk_norm + q_head[:, None] * DIM + channel[None, :])
        q_norm_other = tl.load(qk_norm + q_head[:, None] * DIM + partner[None, :])
        k_norm = tl.load(qk_norm + at * DIM + channel)
        k_norm_other = tl.load(qk_norm + at * DIM + partner)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if split < num_active:
        token_row = qkv + seq * (HEADS + 2 * KV_HEADS) * DIM
        own = tl.load(token_row + q_head[:, None] * DIM + channel[None, :]).to(tl.float32)
        other = tl.load(token_row + q_head[:, None] * DIM + partner[None, :]).to(tl.float32)
        new_own = tl.load(token_row + at * DIM + channel)
        new_other = tl.load(token_row + at * DIM + partner)
        new_value = tl.load(token_row + (at + KV_HEADS) * DIM + channel).to(tl.float32)
        if HAS_NORM:
            norm = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
            own = own * norm * q_norm.to(tl.float32)
            other = other * norm * q_norm_other.to(tl.float32)
        rotated = own * c[None, :] + other * s[None, :]
        q = rotated.to(qkv.dtype.element_ty)
        factor = scale * of_key
        best = tl.full((GROUP_PAD,), NEVER, tl.float32)
        total = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, DIM), tl.float32)
        if (split == num_active - 1) & (length > 0):
            new_key = _turned(new_own, new_other, k_norm, k_norm_other, c, s, eps, DIM, HAS_NORM)
            stored_key = stored(finite(new_key) / of_key, keys.dtype.element_ty)
            stored_value = stored(finite(new_value) / of_value, values.dtype.element_ty)
            if slot >= 0:
                tl.store(keys + target + channel, stored_key)
                tl.store(values + target + channel, stored_value)
            score = tl.sum(q.to(tl.float32) * stored_key.to(tl.float32)[None, :], 1) * factor
            best = _capped(score, soft_cap, HAS_SOFT_CAP)
            total = tl.full((GROUP_PAD,), 1.0, tl.float32)
            acc += stored_value.to(tl.float32)[None, :]
        best, total, acc = _add_tile(q, tile, value, inside, best, total, acc, factor, soft_cap, HAS_SOFT_CAP)
        for begin in range(start + TILE, stop, TILE):
            token = begin + index
            inside = token < stop
            row = _block_rows(table, token, inside, kv_head, KV_HEADS, PAGE, DIM)
            tile = tl.load(keys + row[None, :] + channel[:, None], mask=inside[None, :], other=0.0)
            value = tl.load(values + row[:, None] + channel[None, :], mask=inside[:, None], other=0.0)
            best, total, acc = _add_tile(
                q, tile, value, inside, best, total, acc, factor, soft_cap, HAS_SOFT_CAP
            )
        is_last = num_active <= 1
        if num_active > 1:
            group = seq * KV_HEADS + kv_head
            is_head = member < GROUP
            first_row = group * SPLITS * GROUP + member
            own_row = first_row + split * GROUP
            is_last = arrive(
                best, total, acc, partial, stats, arrivals + group, own_row, is_head, num_active, DIM
            )
            if is_last:
                best, total, acc = add_shares(
                    partial, stats, first_row, is_head, num_active, GROUP_PAD, DIM, GROUP, 1
                )
        if is_last:
            if HAS_SINKS:
                sink = tl.load(sinks + q_head).to(tl.float32) * LOG2_E
                total += tl.exp2(tl.where(length > 0, sink - best, NEVER))
            result = acc * of_value / tl.where(total > 0.0, total, 1.0)[:, None]
            place = out + (seq * HEADS + q_head)[:, None] * DIM + channel[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=(member < GROUP)[:, None])
