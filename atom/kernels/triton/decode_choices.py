"""Which kernel and which blocks serve a linear layer of a decode step.

``gemv``, ``gluon`` and ``mma`` serve one token, ``loop``, ``rows``, ``ring`` and ``tile`` up to 64, ``batch`` more, on
sm_90 alone. What is best was measured for the shapes of ``LINEAR_CHOICES`` and ``BATCHES`` on an H200; other shapes
follow rules drawn from them, and ``decode_table`` overrides both with what was measured on this machine. A choice
depends on (N, K) and on the class of the number of tokens, on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton

from atom.kernels.triton import batch_linear
from atom.kernels.triton.batch_linear import BatchShape
from atom.kernels.triton.hopper import MULTIPROCESSORS

MAX_TOKENS = 64  # of every kernel but ``batch``
# The most tokens of each class that has its own choices.
CLASSES = (1, 8, 16, 32, MAX_TOKENS)
BATCH_CLASSES = (128, 256, 512)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """``out [M, N] = residual + act(x [M, K] @ weight^T + bias)``; with an activation the weight has 2 N rows."""

    N: int
    K: int
    activation: int = 0

    @property
    def weight_rows(self) -> int:
        return 2 * self.N if self.activation else self.N


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel's name and its block sizes, in the order of its builder."""

    kernel: str
    blocks: tuple[int, ...]


OF_ONE_TOKEN = ("gemv", "gluon", "mma")
NEED_GLUON = ("gluon", "mma", "ring", "tile", "batch")

# (N, K, has an activation) -> by class.
LINEAR_CHOICES: dict[tuple[int, int, bool], tuple[Choice, ...]] = {
    (4096, 1024, False): (
        Choice("mma", (16, 4)), Choice("ring", (16, 256, 1, 4, 4, 4)),
        Choice("tile", (32, 128, 1, 8, 3, 0)), Choice("loop", (64, 128, 2, 5, 0)),
        Choice("tile", (64, 128, 1, 8, 6, 0)),
    ),
    (1024, 2048, False): (
        Choice("mma", (8, 8)), Choice("ring", (8, 512, 1, 4, 4, 4)),
        Choice("tile", (32, 128, 4, 4, 3, 0)), Choice("ring", (32, 256, 4, 2, 4, 8)),
        Choice("ring", (32, 256, 4, 2, 4, 8)),
    ),
    (3072, 1024, True): (
        Choice("mma", (16, 4)), Choice("ring", (32, 512, 1, 2, 8, 8)),
        Choice("loop", (64, 128, 1, 6, 0)), Choice("loop", (64, 128, 1, 6, 0)),
        Choice("tile", (32, 128, 1, 8, 3, 0)),
    ),
    (1024, 3072, False): (
        Choice("mma", (16, 16)), Choice("ring", (16, 256, 4, 3, 4, 4)),
        Choice("tile", (32, 128, 4, 6, 3, 0)), Choice("ring", (32, 256, 4, 3, 4, 4)),
        Choice("tile", (64, 128, 4, 6, 6, 1)),
    ),
    (3072, 2048, False): (
        Choice("gemv", (8, 4)), Choice("ring", (32, 512, 1, 4, 4, 4)),
        Choice("tile", (64, 128, 2, 8, 6, 0)), Choice("loop", (64, 128, 2, 5, 0)),
        Choice("tile", (128, 128, 4, 4, 4, 1)),
    ),
    (2048, 2048, False): (
        Choice("gluon", (4, 4)), Choice("ring", (16, 512, 1, 4, 8, 8)),
        Choice("tile", (64, 128, 4, 4, 4, 0)), Choice("ring", (32, 256, 4, 2, 4, 8)),
        Choice("tile", (64, 128, 2, 8, 6, 1)),
    ),
    (8192, 2048, True): (
        Choice("gluon", (2, 4)), Choice("loop", (64, 128, 1, 5, 0)),
        Choice("tile", (128, 128, 1, 4, 6, 0)), Choice("loop", (128, 128, 1, 6, 0)),
        Choice("tile", (64, 128, 1, 4, 3, 0)),
    ),
    (2048, 8192, False): (
        Choice("gemv", (4, 8)), Choice("ring", (16, 512, 2, 4, 8, 8)),
        Choice("tile", (64, 128, 4, 8, 6, 0)), Choice("loop", (64, 128, 4, 5, 0)),
        Choice("tile", (64, 128, 4, 8, 6, 0)),
    ),
    (6144, 4096, False): (
        Choice("gemv", (4, 4)), Choice("ring", (8, 512, 1, 8, 4, 4)),
        Choice("tile", (64, 128, 1, 8, 6, 0)), Choice("loop", (64, 128, 1, 6, 0)),
        Choice("tile", (64, 128, 1, 8, 6, 0)),
    ),
    (4096, 4096, False): (
        Choice("gemv", (4, 4)), Choice("ring", (64, 256, 2, 5, 4, 4)),
        Choice("tile", (64, 128, 2, 8, 6, 0)), Choice("ring", (64, 256, 2, 5, 4, 8)),
        Choice("tile", (64, 128, 2, 8, 6, 1)),
    ),
    (14336, 4096, True): (
        Choice("gemv", (4, 4)), Choice("loop", (64, 128, 1, 4, 0)),
        Choice("loop", (64, 128, 1, 4, 0)), Choice("loop", (64, 128, 1, 4, 0)),
        Choice("tile", (128, 128, 1, 4, 6, 0)),
    ),
    (4096, 14336, False): (
        Choice("gemv", (2, 4)), Choice("loop", (64, 128, 2, 6, 0)),
        Choice("tile", (64, 128, 4, 4, 3, 0)), Choice("loop", (64, 128, 2, 6, 0)),
        Choice("tile", (64, 128, 2, 8, 6, 1)),
    ),
}  # fmt: skip

# Of products of more tokens: rows of a group of warps, groups, tokens, stages. Two, so that few kernels serve a model.
TALL, FLAT = (64, 2, 128, 6), (64, 1, 128, 8)
# As LINEAR_CHOICES, of 128 and of 256 tokens: tiles, and programs that share them.
BATCHES: dict[tuple[int, int, bool], tuple[BatchShape, BatchShape]] = {
    (4096, 1024, False): (BatchShape(*FLAT, 64), BatchShape(*FLAT, 128)),
    (1024, 2048, False): (BatchShape(*FLAT, 64), BatchShape(*FLAT, 64)),
    (3072, 1024, True): (BatchShape(*FLAT, 96), BatchShape(*FLAT, 128)),
    (1024, 3072, False): (BatchShape(*FLAT, 64), BatchShape(*FLAT, 64)),
    (3072, 2048, False): (BatchShape(*FLAT, 96), BatchShape(*FLAT, 96)),
    (2048, 2048, False): (BatchShape(*FLAT, 64), BatchShape(*FLAT, 128)),
    (8192, 2048, True): (BatchShape(*TALL, 128), BatchShape(*TALL, 128)),
    (2048, 8192, False): (BatchShape(*FLAT, 128), BatchShape(*FLAT, 128)),
    (6144, 4096, False): (BatchShape(*TALL, 96), BatchShape(*TALL, 96)),
    (4096, 4096, False): (BatchShape(*TALL, 64), BatchShape(*FLAT, 128)),
    (14336, 4096, True): (BatchShape(*TALL, 112), BatchShape(*TALL, 128)),
    (4096, 14336, False): (BatchShape(*TALL, 128), BatchShape(*TALL, 128)),
}


def power_of_two_divisor(n: int, limit: int) -> int:
    """The largest power of two that divides ``n``, at most ``limit`` (a power of two)."""
    return min(n & -n, limit)


def default_choice(shape: LinearShape, num_tokens: int, has_gluon: bool) -> Choice:
    """The blocks for a shape, measured or by rule.

    Raises ValueError where no kernel serves so many tokens (:func:`serves`).
    """
    if num_tokens > MAX_TOKENS:
        if not serves(shape, num_tokens, has_gluon):
            raise ValueError(f"no kernel of decode steps serves {shape} and {num_tokens} tokens")
        return Choice("batch", tuple(_batch_blocks(shape, token_class(num_tokens))))
    index = CLASSES.index(token_class(num_tokens))
    measured = LINEAR_CHOICES.get((shape.N, shape.K, shape.activation > 0))
    if measured is not None:
        choice = measured[index]
        if has_gluon or choice.kernel not in NEED_GLUON:
            return choice
    if index == 0:
        if has_gluon and shape.K < 2048 and fits_gluon(shape, 2, 4):
            return Choice("gluon", (2, 4))
        return Choice("gemv", (_gemv_rows(shape.K), 4))
    blocks = _tile_blocks(shape, CLASSES[index]) if has_gluon else None
    if blocks is not None:
        return Choice("tile", blocks)
    if index in (1, 2) and shape.weight_rows * shape.K <= 1 << 22 and fits_rows(shape, 16, 4):
        return Choice("rows", (16, 4))
    return Choice("loop", _loop_blocks(shape))


def serves(shape: LinearShape, num_tokens: int, has_gluon: bool) -> bool:
    """Whether there is a kernel for a shape and so many tokens."""
    if num_tokens <= MAX_TOKENS:
        return True
    is_class = num_tokens <= BATCH_CLASSES[-1]
    return has_gluon and is_class and fits_batch(shape, _batch_blocks(shape, token_class(num_tokens)))


def _batch_blocks(shape: LinearShape, most_tokens: int) -> BatchShape:
    """Tiles that programs need not share where those keep most of the chip busy, of 128 rows rather than of 64."""
    measured = BATCHES.get((shape.N, shape.K, shape.activation > 0))
    if measured is not None:
        return measured[most_tokens > 128]
    tiles = {
        blocks: triton.cdiv(shape.weight_rows, blocks[0] * blocks[1]) * (most_tokens // blocks[2])
        for blocks in (TALL, FLAT)
    }
    for blocks, number in tiles.items():
        if 96 <= number <= MULTIPROCESSORS:
            return BatchShape(*blocks, number)
    if tiles[TALL] > MULTIPROCESSORS or tiles[TALL] * shape.K >= 1 << 19:
        return BatchShape(*TALL, 128)
    return BatchShape(*FLAT, 64 if tiles[FLAT] * shape.K < 1 << 17 else 128)


def fits_batch(shape: LinearShape, blocks: tuple[int, ...]) -> bool:
    """Whether ``BatchShape(*blocks)`` covers the shape and fits a multiprocessor, with a residual and a norm behind."""
    rows, groups, tokens, stages, programs = built = BatchShape(*blocks)
    is_built = (
        rows in (64, 128) and groups in (1, 2) and tokens in (64, 128, 256) and rows * tokens <= 1 << 14
    )
    if not is_built or shape.K % batch_linear.STEP or shape.N % 8:
        return False
    is_gated = shape.activation > 0
    is_behind = not is_gated  # in a decode step
    return BATCH_CLASSES[-1] // tokens <= programs <= MULTIPROCESSORS and (
        min(stages, built.stages_there(is_gated, is_behind, is_behind)) >= 2
    )


def _tile_blocks(shape: LinearShape, most_tokens: int) -> tuple[int, ...] | None:
    """The tallest tiles that keep most of the chip busy, with few splits; None: the shape has too few rows."""
    for rows, split in ((128, 1), (64, 1), (64, 2), (64, 4), (32, 1), (32, 2), (32, 4), (32, 8)):
        programs, steps = shape.weight_rows // rows * split, shape.K // split // 128
        is_alone = programs <= MULTIPROCESSORS  # on its multiprocessor
        token_stages = min(steps, 6 if is_alone else 3)
        left = ((224 if is_alone else 112) << 10) - token_stages * MAX_TOKENS * 256
        is_cluster = int(split > 1 and most_tokens == MAX_TOKENS)
        blocks = (rows, 128, split, min(steps, left // (rows * 256)), token_stages, is_cluster)
        if programs >= 96 and fits_tile(shape, blocks, most_tokens):
            return blocks
    return None


def _gemv_rows(columns: int) -> int:
    if columns > 4096:
        return 2
    return 4 if columns >= 2048 else 8 if columns >= 1024 else 16


def _loop_blocks(shape: LinearShape) -> tuple[int, int, int, int, int]:
    programs = triton.cdiv(shape.weight_rows, 64)
    for split in (1, 2, 4, 8):
        width = power_of_two_divisor(shape.K // split, 128) if shape.K % split == 0 else 0
        if width >= 64 and programs * split >= 96:
            return 64, width, split, 5, 0
    return 64, power_of_two_divisor(shape.K, 128), 1, 5, 0


def fits(choice: Choice, shape: LinearShape, most_tokens: int) -> bool:
    """Whether a kernel has this name and such blocks, and with them computes layers of ``shape`` for the class.

    Raises ValueError or TypeError where the number of blocks is another kernel's.
    """
    if most_tokens > MAX_TOKENS or choice.kernel == "batch":
        return most_tokens > MAX_TOKENS and choice.kernel == "batch" and fits_batch(shape, choice.blocks)
    if choice.kernel in OF_ONE_TOKEN:
        rows, warps = choice.blocks
        is_usual = all(number > 0 and number & (number - 1) == 0 for number in choice.blocks)
        if most_tokens > 1 or not is_usual:
            return False
        fits_kernel = {"gluon": fits_gluon, "mma": fits_mma}.get(choice.kernel)
        return fits_kernel is None or fits_kernel(shape, rows, warps)
    # The last of other kernels may be 0.
    sizes = choice.blocks if choice.kernel in ("rows", "ring") else choice.blocks[:-1]
    if most_tokens == 1 or min(sizes) < 1:
        return False
    if choice.kernel == "loop":
        tall, width, split, _, _ = choice.blocks
        return tall in (16, 32, 64, 128) and width & (width - 1) == 0 and shape.K % (split * width) == 0
    if choice.kernel == "rows":
        return fits_rows(shape, *choice.blocks)
    if choice.kernel == "ring":
        return fits_ring(shape, choice.blocks, most_tokens)
    return choice.kernel == "tile" and fits_tile(shape, choice.blocks, most_tokens)


def fits_gluon(shape: LinearShape, rows_a_warp: int, warps: int) -> bool:
    """Whether rows divide evenly and a thread can hold them; columns go in chunks of 256 at least."""
    held = rows_a_warp * shape.K * (2 if shape.activation else 1) // 32
    return shape.N % (rows_a_warp * warps) == 0 and shape.K % 256 == 0 and held <= 256


def fits_mma(shape: LinearShape, rows: int, warps: int) -> bool:
    """Whether rows divide evenly, columns go into chunks of 64 for each warp, and a thread can hold its share.

    With more than 64 registers of weights the compiler spilled.
    """
    per_program = rows // 2 if shape.activation else rows
    is_tile = rows == 16 or (rows == 8 and not shape.activation)
    if not is_tile or warps not in (2, 4, 8, 16) or shape.N % per_program or shape.K % (64 * warps):
        return False
    weights, inputs = rows * shape.K // (64 * warps), shape.K // (8 * warps)  # registers of a thread
    return weights <= 64 and inputs <= 64


def fits_rows(shape: LinearShape, rows: int, warps: int) -> bool:
    """Whether the whole-rows kernel for few tokens can hold its rows in registers."""
    return chunk(shape.K) // warps >= 16 and rows * shape.K // (32 * warps) <= 128 and rows % 8 == 0


def chunk(columns: int) -> int:
    """Columns that the whole-rows kernel takes at a time."""
    return (
        power_of_two_divisor(columns, 4096)
        if columns & (columns - 1) == 0
        else power_of_two_divisor(columns, 1024)
    )


def fits_ring(shape: LinearShape, blocks: tuple[int, ...], most_tokens: int = MAX_TOKENS) -> bool:
    """Whether ``(rows, columns a step, splits, stages, slices, warps)`` cover the shape and fit a multiprocessor.

    A warp takes at least 64 columns of a step. The registers that a thread needs are estimated: where it was more
    than this, the compiler spilled.
    """
    rows, width, split, stages, slices, warps = blocks
    if warps % slices or width % slices or width // slices not in (64, 128, 256):
        return False
    wide, steps = padded(most_tokens), shape.K // split // width
    along_rows = warps // slices
    if rows & (rows - 1) or rows // along_rows < 8 or shape.weight_rows % rows or shape.K % (split * width):
        return False
    values = wide * rows // along_rows + wide * width // slices // 2 * min(2, steps)
    # A step's weights, and shares of the sums of squares.
    values += rows // along_rows * 32 + 64 * wide // warps
    shared = max(stages * rows * width * 2, slices * wide * rows * 4)
    return values // 32 <= 200 and shared <= 220_000 and stages <= steps


def _ring_candidates(shape: LinearShape, num_tokens: int) -> Iterator[Choice]:
    """Rings that ask for 24 to 200 KB a program before the wait, with as few splits as keep most chips busy."""
    most, seen = token_class(num_tokens), set()
    for rows in (8, 16, 32, 64, 128):
        for slices, along_rows, width in ((4, 1, 64), (4, 1, 128), (8, 1, 64), (8, 1, 128), (4, 2, 64)):
            for split in (1, 2, 4, 8):
                programs, step = shape.weight_rows // rows * split, slices * width
                steps = shape.K // split // step
                if not 96 <= programs <= 1056 or (split > 1 and programs > 300) or steps < 1:
                    continue
                for held in (64 << 10, 160 << 10):
                    stages = min(steps, held // (rows * step * 2))
                    blocks = (rows, step, split, stages, slices, slices * along_rows)
                    is_short = stages < min(steps, 3) or stages * rows * step < 12 << 10
                    if blocks not in seen and not is_short and fits_ring(shape, blocks, most):
                        seen.add(blocks)
                        yield Choice("ring", blocks)


def fits_tile(shape: LinearShape, blocks: tuple[int, ...], most_tokens: int = MAX_TOKENS) -> bool:
    """Whether ``(rows, columns a step, splits, stages of weights, of tokens, is a cluster)`` cover the shape and fit.

    A stage is asked for again behind the step after its own, so there are two where there are fewer than steps.
    Programs of a cluster have parts of tiles only where they are all of a tile: with ``MAX_TOKENS``.
    """
    rows, width, split, weight_stages, token_stages, is_cluster = blocks
    covers = rows in (16, 32, 64, 128) and width in (64, 128)
    if not covers or shape.weight_rows % rows or shape.K % (split * width):
        return False
    if is_cluster and (split == 1 or padded(most_tokens) < MAX_TOKENS):
        return False
    # A program that adds all sums of a tile holds them in registers: more of them spilled.
    if not is_cluster and split > 1 and rows * split * padded(most_tokens) > 1 << 14:
        return False
    steps = shape.K // split // width
    held = (weight_stages * rows + token_stages * MAX_TOKENS) * width * 2
    is_served = all(min(steps, 2) <= stages <= steps for stages in (weight_stages, token_stages))
    return is_served and max(held, MAX_TOKENS * rows * 4) <= 225 << 10


def _tile_candidates(shape: LinearShape, num_tokens: int) -> Iterator[Choice]:
    """Tiles of which one or two fit a multiprocessor, with as few splits as keep most of the chip busy."""
    seen = set()
    for rows in (32, 64, 128):
        for split in (1, 2, 4, 8):
            programs, steps = shape.weight_rows // rows * split, shape.K // split // 128
            if not 64 <= programs <= 1056 or (split > 1 and programs > 300) or not steps:
                continue
            for held, token_stages in ((112, 3), (224, 6)):
                token_stages = min(steps, token_stages)
                left = (held << 10) - token_stages * MAX_TOKENS * 256
                weight_stages = min(steps, left // (rows * 256))
                for is_cluster in (0, 1):
                    blocks = (rows, 128, split, weight_stages, token_stages, is_cluster)
                    if blocks not in seen and fits_tile(shape, blocks, num_tokens):
                        seen.add(blocks)
                        yield Choice("tile", blocks)


def candidates(shape: LinearShape, num_tokens: int, has_gluon: bool) -> Iterator[Choice]:
    """What is worth measuring for a shape."""
    if num_tokens > MAX_TOKENS:
        yield from _batch_candidates(shape, num_tokens)
        return
    if num_tokens == 1:
        for rows in (1, 2, 4, 8, 16):
            for warps in (2, 4, 8):
                held = rows * shape.K // (32 * warps)
                if 24 <= held <= 128 and not (shape.activation and rows < 2):
                    yield Choice("gemv", (rows, warps))
        if has_gluon:
            for rows in (1, 2, 4):
                for warps in (2, 4, 8):
                    if fits_gluon(shape, rows, warps):
                        yield Choice("gluon", (rows, warps))
            for rows in (8, 16):
                for warps in (4, 8, 16):
                    if fits_mma(shape, rows, warps):
                        yield Choice("mma", (rows, warps))
        return
    if has_gluon:
        yield from _tile_candidates(shape, num_tokens)
    if num_tokens > 16:  # what is likely best comes first
        yield from _loop_candidates(shape)
    if has_gluon:
        yield from _ring_candidates(shape, num_tokens)
    if num_tokens <= 16:
        yield from _loop_candidates(shape)
    for rows in (8, 16, 32):
        for warps in (4, 8):
            if fits_rows(shape, rows, warps) and 64 <= shape.weight_rows // rows <= 512 and num_tokens <= 32:
                yield Choice("rows", (rows, warps))


def _loop_candidates(shape: LinearShape) -> Iterator[Choice]:
    """Loops of stages that fill a multiprocessor, and where the rows alone fill the chip, of fewer."""
    for tall in (64, 128):
        for width in (64, 128):
            for split in (1, 2, 4, 8):
                programs = triton.cdiv(shape.weight_rows, tall) * split
                if shape.K % (split * width) or not 64 <= programs <= 528 or shape.K // split // width < 2:
                    continue
                if programs // split * 2 > MULTIPROCESSORS and (
                    width == 64 or split > 2
                ):  # rows alone nearly fill the chip
                    continue
                yield Choice("loop", (tall, width, split, 6 if width == 128 else 8, 0))
                if width == 128 and programs > MULTIPROCESSORS:
                    yield Choice("loop", (tall, width, split, 3, 0))


def _batch_candidates(shape: LinearShape, num_tokens: int) -> Iterator[Choice]:
    """Runs of equal length, by whole tiles or simple parts of them."""
    for rows, groups, tokens, stages in ((64, 2, 128, 6), (64, 1, 128, 8), (64, 2, 64, 8)):
        token_tiles = triton.cdiv(num_tokens, tokens)
        tiles = triton.cdiv(shape.weight_rows, rows * groups) * token_tiles
        parts = {tiles // n for n in (2, 3, 4) if tiles % n == 0} | {tiles * n for n in (1, 2, 4)}
        for programs in sorted({128, *parts}):
            blocks = BatchShape(rows, groups, tokens, stages, programs)
            if programs >= 64 and fits_batch(shape, blocks):
                yield Choice("batch", tuple(blocks))


def token_class(num_tokens: int) -> int:
    """The class of ``CLASSES`` or ``BATCH_CLASSES`` that choices for ``num_tokens`` are kept by.

    Raises ValueError above the last.
    """
    for most in CLASSES + BATCH_CLASSES:
        if num_tokens <= most:
            return most
    raise ValueError(f"no kernel serves {num_tokens} tokens: at most {BATCH_CLASSES[-1]}")


def without_scaled(choice: Choice, shape: LinearShape) -> Choice:
    """What serves a norm that no launch did half of: values of tiles pass no registers in which it could be taken."""
    return Choice("loop", _loop_blocks(shape)) if choice.kernel == "tile" else choice


def padded(num_tokens: int) -> int:
    """The tokens of a product, with those that only fill it up."""
    return max(16, triton.next_power_of_2(num_tokens))
