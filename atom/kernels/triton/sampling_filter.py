"""Rows with top-k, top-p or min-p: what may be sampled is found by search among floats, not by sorting ids.

All three keep a beginning of the order (logit, lowest id), so what they keep is given by the least logit kept and by
how many of its ties. Whether a logit ``v`` is kept follows from how many ids lie above it and from their weight, and
the least such ``v`` is searched by halving (here: quartering) the range of floats.

The first launch searches among the spans' largest logits. These are a part of the row, so that the result is a lower
bound, and only spans that reach it are looked at by the second: for top-k few more than k.
"""

import torch
import triton
import triton.language as tl

from atom.kernels.reference.sampling import TOP_P_SLACK, Draw
from atom.kernels.triton.sampling_parts import SPAN, from_step, load_spans, to_step, weigh

_SLACK = tl.constexpr(TOP_P_SLACK)
_MARGIN = tl.constexpr(1e-5)  # of a sum in fp32, so that a bound stays one
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # low bits that are zero as fp32
ROWS = 16  # spans that a program looks at together
_NUM_WARPS = 16


@triton.jit
def _limits(top_k, top_p, row, num_ids):
    """Top-k, int32, and top-p of a row, and whether each is on; without top-k the limit is out of reach."""
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    is_limited = (k > 0) & (k < num_ids)
    return tl.where(is_limited, k, num_ids + 1).to(tl.int32), p, is_limited, p < 1.0


@triton.jit(do_not_specialize=["num_ids"])
def _narrow(
    largest,
    sums,
    temperature,
    top_k,
    top_p,
    min_p,
    spans,  # [n, num_spans] int32, written: those that can hold kept ids, ascending
    bounds,  # [n, 2] int64, written: the lowest step that can be kept; how many spans
    totals,  # [n] float64, written: the row's weight
    num_ids,
    num_spans,
    SPANS_PAD: tl.constexpr,
    SPAN: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    limit, p, is_limited, is_nucleus = _limits(top_k, top_p, row, num_ids)
    least = tl.load(min_p + row)
    span = tl.arange(0, SPANS_PAD)
    place = row * num_spans + span
    peaks = tl.load(largest + place, mask=span < num_spans, other=float("-inf"))
    best = tl.max(peaks, 0)
    if (heat > 0) & (best - best == 0.0) & (is_limited | is_nucleus | (least > 0)):
        weights = weigh(peaks, best, heat)
        share = tl.load(sums + place, mask=span < num_spans, other=0.0)
        total = tl.sum((share * weights).to(tl.float64), 0)
        bound = float("inf")
        if is_nucleus & (is_limited == 0):  # else it is a share of what top-k keeps
            bound = ((p - _SLACK) * total * (1.0 + _MARGIN)).to(tl.float32)
        top = to_step(best, SHIFT)
        low = to_step(best - float("inf"), SHIFT) - 1
        high = top
        while high - low > 1:
            middle = (low + high) >> 1
            is_above = peaks > from_step(middle, SHIFT)
            count = tl.sum(is_above.to(tl.int32), 0)
            mass = tl.sum(tl.where(is_above, weights, 0.0), 0)
            if (count < limit) & (mass < bound):
                high = middle
            else:
                low = middle
        if (least > 0) & ((is_limited & is_nucleus) == 0):
            floor = best + heat * (tl.log(least) - 1e-3)
            high = tl.minimum(tl.maximum(high, to_step(floor, SHIFT)), top)
        is_chosen = (peaks >= from_step(high, SHIFT)) & (span * SPAN < num_ids)
        at = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
        tl.store(spans + row * num_spans + at, span, mask=is_chosen)
        tl.store(bounds + 2 * row, high)
        tl.store(bounds + 2 * row + 1, tl.sum(is_chosen.to(tl.int64), 0))
        tl.store(totals + row, total)


@triton.jit
def _tally(base, spans, count, num_ids, level, best, heat, ROWS: tl.constexpr, SPAN: tl.constexpr):
    """How many ids lie above ``level``, their weight, and how many are at it."""
    num = tl.zeros((ROWS * SPAN,), tl.int32)
    ties = tl.zeros((ROWS * SPAN,), tl.int32)
    mass = tl.zeros((ROWS * SPAN,), tl.float32)
    for first in range(0, count, ROWS):
        value, _ = load_spans(base, spans, first, count, num_ids, ROWS, SPAN)
        is_above = value > level
        num += is_above.to(tl.int32)
        ties += (value == level).to(tl.int32)
        mass += tl.where(is_above, weigh(value, best, heat), 0.0)
    return tl.sum(num, 0), tl.sum(mass.to(tl.float64), 0), tl.sum(ties, 0)


@triton.jit
def _search(
    base,
    spans,
    count,
    num_ids,
    best,
    heat,
    low,  # steps: not kept
    high,  # kept
    limit,
    share,
    least,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The lowest step that is kept: fewer than ``limit`` ids above it, less weight than ``share``, and a weight of
    at least ``least``."""
    while high - low > 1:
        width = high - low
        step_a, step_b, step_c = low + (width + 3) // 4, low + width // 2, low + 3 * width // 4
        a, b, c = from_step(step_a, SHIFT), from_step(step_b, SHIFT), from_step(step_c, SHIFT)
        num_a = tl.zeros((ROWS * SPAN,), tl.int32)
        num_b = tl.zeros((ROWS * SPAN,), tl.int32)
        num_c = tl.zeros((ROWS * SPAN,), tl.int32)
        mass_a = tl.zeros((ROWS * SPAN,), tl.float32)
        mass_b = tl.zeros((ROWS * SPAN,), tl.float32)
        mass_c = tl.zeros((ROWS * SPAN,), tl.float32)
        for first in range(0, count, ROWS):
            value, _ = load_spans(base, spans, first, count, num_ids, ROWS, SPAN)
            weight = weigh(value, best, heat)
            num_a += (value > a).to(tl.int32)
            num_b += (value > b).to(tl.int32)
            num_c += (value > c).to(tl.int32)
            mass_a += tl.where(value > a, weight, 0.0)
            mass_b += tl.where(value > b, weight, 0.0)
            mass_c += tl.where(value > c, weight, 0.0)
        keeps_a = (tl.sum(num_a, 0) < limit) & (tl.sum(mass_a, 0) < share) & (weigh(a, best, heat) >= least)
        keeps_b = (tl.sum(num_b, 0) < limit) & (tl.sum(mass_b, 0) < share) & (weigh(b, best, heat) >= least)
        keeps_c = (tl.sum(num_c, 0) < limit) & (tl.sum(mass_c, 0) < share) & (weigh(c, best, heat) >= least)
        if keeps_a:
            high = step_a
        elif keeps_b:
            low, high = step_a, step_b
        elif keeps_c:
            low, high = step_b, step_c
        else:
            low = step_c
    return high


@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["positions", "rows"])
def _pick_kept(
    logits,
    largest,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    spans,
    bounds,
    totals,
    rows,
    last_token,
    ids,
    row_stride,
    num_ids,
    num_spans,
    ADVANCES: tl.constexpr,
    SPANS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    limit, p, is_limited, is_nucleus = _limits(top_k, top_p, row, num_ids)
    least = tl.load(min_p + row)
    at = tl.arange(0, SPANS_PAD)
    best = tl.max(tl.load(largest + row * num_spans + at, mask=at < num_spans, other=float("-inf")), 0)
    if (heat > 0) & (best - best == 0.0) & (is_limited | is_nucleus | (least > 0)):
        base = logits + row * row_stride
        spans += row * num_spans
        count = tl.load(bounds + 2 * row + 1).to(tl.int32)
        low = tl.load(bounds + 2 * row) - 1
        top = to_step(best, SHIFT)
        total = tl.load(totals + row)
        if is_limited & is_nucleus:
            step = _search(
                base, spans, count, num_ids, best, heat, low, top, limit, float("inf"), -1.0, ROWS, SPAN, SHIFT,
            )  # fmt: skip
            low = step - 1
            level = from_step(step, SHIFT)
            num, total, _ = _tally(base, spans, count, num_ids, level, best, heat, ROWS, SPAN)
            total += ((limit - num).to(tl.float32) * weigh(level, best, heat)).to(tl.float64)
        share = total * 0.0 + float("inf")
        if is_nucleus:
            share = (p.to(tl.float64) - _SLACK) * total
        step = _search(
            base, spans, count, num_ids, best, heat, low, top, limit, share.to(tl.float32), least, ROWS, SPAN, SHIFT,
        )  # fmt: skip
        level = from_step(step, SHIFT)
        num, mass, ties = _tally(base, spans, count, num_ids, level, best, heat, ROWS, SPAN)
        weight_at = weigh(level, best, heat).to(tl.float64)
        room = limit - num
        if is_nucleus & (weight_at > 0):
            room = tl.minimum(room.to(tl.float64), tl.ceil((share - mass) / weight_at)).to(tl.int32)
        ties = tl.minimum(ties, tl.maximum(room, (num == 0).to(tl.int32)))  # the best is always kept
        target = (mass + ties * weight_at) * tl.rand(tl.load(seeds + row), tl.load(positions + row)).to(
            tl.float64
        )

        # The listed spans in which the running sum passes the target; never past the last with any weight.
        carried = target * 0.0
        before = target * 0.0
        seen = num * 0
        seen_before = num * 0
        chosen = num * 0
        for first in range(0, count, ROWS):
            if carried <= target:
                value, _ = load_spans(base, spans, first, count, num_ids, ROWS, SPAN)
                num_here = tl.sum((value == level).to(tl.int32), 0)
                own = tl.sum(tl.where(value > level, weigh(value, best, heat), 0.0).to(tl.float64), 0)
                own += tl.minimum(num_here, tl.maximum(ties - seen, 0)) * weight_at
                if own > 0:
                    chosen = first + num * 0
                    before = carried
                    seen_before = seen
                carried += own
                seen += num_here
        value, column = load_spans(base, spans, chosen, count, num_ids, ROWS, SPAN)
        is_tie = (value == level).to(tl.int32)
        rank = seen_before + tl.cumsum(is_tie, 0) - is_tie
        is_kept = (value > level) | ((is_tie > 0) & (rank < ties))
        weight = tl.where(is_kept, weigh(value, best, heat), 0.0).to(tl.float64)
        index = tl.arange(0, ROWS * SPAN)
        found = tl.min(tl.where(tl.cumsum(weight, 0) > target - before, index, ROWS * SPAN), 0)
        found = tl.minimum(found, tl.max(tl.where(weight > 0, index, 0), 0))
        token = tl.sum(tl.where(index == found, column, 0), 0).to(tl.int64)
        tl.store(ids + row, token)
        if ADVANCES:
            tl.store(last_token + tl.load(rows + row), token)


def pick_filtered(
    logits: torch.Tensor,
    draw: Draw,
    largest: torch.Tensor,
    sums: torch.Tensor,
    ids: torch.Tensor,
    rows: torch.Tensor | None,
    last_token: torch.Tensor | None,
) -> None:
    """Overwrite ``ids`` ``[n]`` int64 of the filtered rows, and ``last_token`` at their ``rows`` where given.

    Args:
        logits: ``[n, vocab]`` in bf16, fp16 or fp32.
        largest: ``[n, spans]`` float32, each span's largest logit; ``sums`` alike, its weights relative to that.
    """
    n, num_ids = logits.shape
    num_spans = largest.shape[1]
    spans = torch.empty((n, num_spans), dtype=torch.int32, device=logits.device)
    bounds = torch.empty((n, 3), dtype=torch.int64, device=logits.device).view(-1)
    totals = bounds[2 * n :].view(torch.float64)
    shape = dict(SPANS_PAD=triton.next_power_of_2(num_spans), SPAN=SPAN, SHIFT=_SHIFTS[logits.dtype])
    filters = (draw.temperature, draw.top_k, draw.top_p, draw.min_p)
    _narrow[(n,)](largest, sums, *filters, spans, bounds, totals, num_ids, num_spans, **shape, num_warps=4)
    _pick_kept[(n,)](
        logits, largest, *filters, draw.seeds, draw.positions, spans, bounds, totals, rows, last_token, ids,
        logits.stride(0), num_ids, num_spans, ADVANCES=last_token is not None, ROWS=ROWS, **shape, num_warps=_NUM_WARPS,
    )  # fmt: skip
