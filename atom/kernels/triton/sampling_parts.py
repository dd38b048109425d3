"""What the sampling kernels share: spans of ids, weights, and floats as steps that are in their order."""

import triton
import triton.language as tl

SPAN = 256  # ids
SPANS = 16  # of a program that measures them
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def weigh(value, best, temperature):
    """``exp((value - best) / temperature)``; minus infinity weighs nothing."""
    return tl.exp2((value - best) * (_LOG2E / temperature))


@triton.jit
def load_span(base, span, num_ids, SPAN: tl.constexpr):
    """A span's logits in fp32, minus infinity past the vocabulary, and their ids."""
    column = span * SPAN + tl.arange(0, SPAN)
    value = tl.load(base + column, mask=column < num_ids, other=float("-inf")).to(tl.float32)
    return value, column


@triton.jit
def load_spans(base, spans, first, count, num_ids, ROWS: tl.constexpr, SPAN: tl.constexpr):
    """The same of ROWS of the ``count`` listed spans, from place ``first`` of the list on: [ROWS * SPAN]."""
    index = tl.arange(0, ROWS * SPAN)
    place = first + index // SPAN
    column = tl.load(spans + place, mask=place < count, other=0) * SPAN + index % SPAN
    value = tl.load(base + column, mask=(place < count) & (column < num_ids), other=float("-inf"))
    return value.to(tl.float32), column


@triton.jit
def to_step(value, SHIFT: tl.constexpr):
    """int64 in the order of finite and infinite floats; those that differ in the lowest SHIFT bits share a step."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int64) >> SHIFT


@triton.jit
def from_step(step, SHIFT: tl.constexpr):
    """The float of a step whose lowest SHIFT bits are zero."""
    key = step << SHIFT
    key = tl.where(step < 0, key | ((1 << SHIFT) - 1), key)
    bits = key.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)
