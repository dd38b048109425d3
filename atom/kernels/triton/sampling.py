"""Sampling in a few launches, without a sort: greedy and random rows, filtered or not, side by side.

Two passes over logits as they are, bf16 or fp32. The first cuts a row into spans of 256 ids and keeps of each the
largest logit and the sum of ``exp((logit - largest) / temperature)``. The second, one program a row, finds the best id
in the first span that holds the largest logit, and the chosen one in the span where the running sum of spans passes
the uniform number's share. Rows with top-k, top-p or min-p take two launches more (``sampling_filter``).

Sums are in a fixed order and a row's do not depend on the others. Exponentials differ from the reference's in the last
bits: the id is the reference's, or its neighbour where the target meets a bound within 2e-6 of the total weight.
Nothing here waits for the device and every launch may be recorded.
"""

import sys

import torch
import triton
import triton.language as tl

from atom.kernels.reference.sampling import Advance, Draw, rank_of
from atom.kernels.registry import register_kernel
from atom.kernels.triton.sampling_filter import pick_filtered
from atom.kernels.triton.sampling_parts import SPAN, SPANS, load_span, weigh

__all__ = ["ADVANCES", "mask_bits", "rank_of", "sample", "top"]

PRIORITY = {"cuda": 10, "rocm": 10}
ADVANCES = True
_NOWHERE = tl.constexpr(0x7FFFFFFF)  # above every id


@triton.jit(do_not_specialize=["num_ids"])
def _measure_spans(
    logits,
    temperature,
    largest,  # [n, num_spans]; NaN counts as infinity
    sums,  # [n, num_spans], of random rows alone
    row_stride,
    num_ids,
    num_spans,
    HAS_RANDOM: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    column = tile * (SPANS * SPAN) + tl.arange(0, SPANS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    places = logits + row * row_stride + column
    if (tile + 1) * (SPANS * SPAN) <= num_ids:  # without a mask the loads are wide
        value = tl.load(places).to(tl.float32)
    else:
        value = tl.load(places, mask=column < num_ids, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    peak = tl.max(value, 1)
    place = row * num_spans + tile * SPANS + tl.arange(0, SPANS)
    tl.store(largest + place, peak)
    if HAS_RANDOM:
        heat = tl.load(temperature + row)
        if heat > 0:
            base = tl.where(peak == float("-inf"), 0.0, peak)
            tl.store(sums + place, tl.sum(weigh(value, base[:, None], heat), 1))


@triton.jit(
    do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["positions", "rows", "context_lens"]
)
def _pick(
    logits,
    largest,
    sums,
    temperature,
    seeds,
    positions,
    rows,
    context_lens,
    computed,
    last_token,
    ids,
    is_finite,
    row_stride,
    num_ids,
    num_spans,
    HAS_RANDOM: tl.constexpr,
    ADVANCES: tl.constexpr,
    SPANS_PAD: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS_PAD)
    place = row * num_spans + span
    base = logits + row * row_stride
    peaks = tl.load(largest + place, mask=span < num_spans, other=float("-inf"))
    best = tl.max(peaks, 0)
    at = tl.min(tl.where(peaks == best, span, SPANS_PAD), 0)
    value, column = load_span(base, at, num_ids, SPAN)
    value = tl.where(value != value, float("inf"), value)
    token = tl.min(tl.where(value == best, column, _NOWHERE), 0)
    is_sound = best - best == 0.0
    if HAS_RANDOM:
        heat = tl.load(temperature + row)
        if (heat > 0) & is_sound:
            share = tl.load(sums + place, mask=span < num_spans, other=0.0)
            mass = (share * weigh(peaks, best, heat)).to(tl.float64)
            running = tl.cumsum(mass, 0)
            uniform = tl.rand(tl.load(seeds + row), tl.load(positions + row))
            target = tl.max(running, 0) * uniform.to(tl.float64)
            # Sums of spans and of ids round differently: never past the last that has any weight.
            at = tl.min(tl.where(running > target, span, SPANS_PAD), 0)
            at = tl.minimum(at, tl.max(tl.where(mass > 0, span, 0), 0))
            target -= tl.sum(tl.where(span < at, mass, 0.0), 0)
            value, column = load_span(base, at, num_ids, SPAN)
            weight = weigh(value, best, heat).to(tl.float64)
            running = tl.cumsum(weight, 0)
            token = tl.min(tl.where(running > target, column, _NOWHERE), 0)
            token = tl.minimum(token, tl.max(tl.where(weight > 0, column, 0), 0))
    tl.store(ids + row, token.to(tl.int64))
    tl.store(is_finite + row, is_sound)
    if ADVANCES:
        own = tl.load(rows + row)
        tl.store(computed + own, tl.load(context_lens + row))
        tl.store(last_token + own, token.to(tl.int64))


def sample(
    logits: torch.Tensor,
    draw: Draw | None = None,
    advance: Advance | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference: ids ``[n]`` int64, and ``[n]`` bool, whether each row's best logit is finite.

    Args:
        logits: ``[n, vocab]`` in any float dtype; a row's ids are contiguous.
        draw: None: every row is greedy.
        advance: with it, the tables take over ids and lengths at the rows' own rows.
        out: what is returned; it is only written, so that it may lie in pinned memory.
    """
    n, num_ids = logits.shape
    device = logits.device
    if out is None:
        out = torch.empty(n, dtype=torch.int64, device=device), torch.empty(
            n, dtype=torch.bool, device=device
        )
    ids, is_finite = out
    if n == 0:
        return out
    tiles = triton.cdiv(num_ids, SPANS * SPAN)
    num_spans = tiles * SPANS
    largest, sums = torch.empty((2, n, num_spans), dtype=torch.float32, device=device)
    has_random = draw is not None
    temperature = draw.temperature if has_random else None
    _measure_spans[(tiles, n)](
        logits, temperature, largest, sums, logits.stride(0), num_ids, num_spans,
        HAS_RANDOM=has_random, SPANS=SPANS, SPAN=SPAN, num_warps=4,
    )  # fmt: skip
    seeds, positions = (draw.seeds, draw.positions) if has_random else (None, None)
    rows, context_lens, computed, last_token = advance or (None, None, None, None)
    _pick[(n,)](
        logits, largest, sums, temperature, seeds, positions, rows, context_lens, computed, last_token, ids, is_finite,
        logits.stride(0), num_ids, num_spans, HAS_RANDOM=has_random, ADVANCES=advance is not None,
        SPANS_PAD=triton.next_power_of_2(num_spans), SPAN=SPAN, num_warps=4,
    )  # fmt: skip
    if has_random and draw.is_filtered:
        pick_filtered(logits, draw, largest, sums, ids, rows, last_token)
    return out


@triton.jit(do_not_specialize=["num_ids", "num_words"])
def _mask(logits, rows, bits, row_stride, num_ids, num_words, BLOCK: tl.constexpr):
    i = tl.program_id(1)
    row = tl.load(rows + i)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = column // 32
    allowed = tl.load(bits + i * num_words + word, mask=word < num_words, other=0) >> (column % 32)
    tl.store(logits + row * row_stride + column, float("-inf"), mask=(column < num_ids) & (allowed & 1 == 0))


def mask_bits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """As the reference, in one launch; writes nothing but what is not allowed."""
    num_ids, num_words = logits.shape[-1], bits.shape[1]
    block = SPANS * SPAN
    _mask[(triton.cdiv(num_ids, block), len(rows))](
        logits, rows, bits, logits.stride(0), num_ids, num_words, BLOCK=block, num_warps=4
    )


def top(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, of fp32 values: selects among int64 keys in the order of (value, lowest id)."""
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    keys |= torch.arange(0x7FFFFFFF, 0x7FFFFFFF - values.shape[-1], -1, device=values.device)
    ids = 0x7FFFFFFF - (keys.topk(k, dim=-1).values & 0x7FFFFFFF)
    return values.gather(-1, ids), ids


register_kernel("sampling", "triton", priority=PRIORITY)(sys.modules[__name__])
