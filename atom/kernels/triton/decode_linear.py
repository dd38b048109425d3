"""The linear layers of a decode step: which kernel and which blocks serve a shape, and the launch.

``gemv`` and ``gluon`` serve one token, ``loop``, ``rows``, ``ring`` and ``tile`` up to 64. What is best was measured
for the shapes of ``MEASURED`` on an H200; other shapes follow rules drawn from them, and ``decode_table`` overrides
both with what was measured on this machine. A choice depends on (N, K) and on the class of the number of tokens, on
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom.kernels.triton import decode_gemm, decode_gemm_tile_gluon, decode_gemv
from atom.kernels.triton.decode_parts import pdl_options

MAX_TOKENS = 64
# The most tokens of each class that has its own choices; products are padded to it.
CLASSES = (1, 8, 16, 32, MAX_TOKENS)


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


@dataclass(slots=True)
class Workspace:
    """Partial sums of splits; ``arrivals`` is zero between launches. ``shares`` of sums of squares, by tile."""

    partial: torch.Tensor  # fp32
    arrivals: torch.Tensor  # int32
    shares: torch.Tensor  # fp32


@dataclass(slots=True)
class Scaled:
    """What a launch leaves for the norm behind it: ``x [M, N]`` times its weight, and shares in the workspace."""

    x: torch.Tensor
    num_shares: int


@dataclass(slots=True)
class LinearArguments:
    """One layer: its tensors, and what stands before and behind the product."""

    weight: torch.Tensor
    norm: torch.Tensor | None = None
    eps: float = 0.0
    bias: torch.Tensor | None = None
    activation: int = 0

    @property
    def shape(self) -> LinearShape:
        rows, columns = self.weight.shape
        return LinearShape(rows // 2 if self.activation else rows, columns, self.activation)

    def flags(self, residual: torch.Tensor | None, uses_pdl: bool) -> dict[str, Any]:
        return {
            "HAS_NORM": self.norm is not None,
            "HAS_BIAS": self.bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "ACTIVATION": self.activation,
            "PDL": uses_pdl,
        }


NEED_GLUON = ("gluon", "ring", "tile")

# (N, K, has an activation) -> by class.
MEASURED: dict[tuple[int, int, bool], tuple[Choice, ...]] = {
    (4096, 1024, False): (
        Choice("gluon", (4, 4)), Choice("ring", (16, 256, 1, 4, 4, 4)), Choice("loop", (64, 128, 2, 5, 0)),
        Choice("loop", (64, 128, 2, 5, 0)), Choice("loop", (64, 128, 2, 5, 0)),
    ),
    (1024, 2048, False): (
        Choice("gluon", (2, 4)), Choice("ring", (8, 512, 1, 4, 4, 4)), Choice("ring", (32, 256, 4, 2, 4, 8)),
        Choice("ring", (32, 256, 4, 2, 4, 8)), Choice("ring", (32, 256, 4, 2, 4, 8)),
    ),
    (3072, 1024, True): (
        Choice("gluon", (2, 8)), Choice("ring", (32, 512, 1, 2, 8, 8)), Choice("loop", (64, 128, 1, 6, 0)),
        Choice("loop", (64, 128, 1, 6, 0)), Choice("loop", (64, 128, 1, 6, 0)),
    ),
    (1024, 3072, False): (
        Choice("gluon", (1, 8)), Choice("ring", (16, 256, 4, 3, 4, 4)), Choice("ring", (32, 256, 4, 3, 4, 4)),
        Choice("ring", (32, 256, 4, 3, 4, 4)), Choice("loop", (64, 128, 8, 4, 0)),
    ),
    (3072, 2048, False): (
        Choice("gemv", (4, 4)), Choice("ring", (32, 512, 1, 4, 4, 4)), Choice("loop", (64, 128, 2, 5, 0)),
        Choice("loop", (64, 128, 2, 5, 0)), Choice("loop", (64, 64, 2, 8, 0)),
    ),
    (2048, 2048, False): (
        Choice("gemv", (4, 4)), Choice("ring", (16, 512, 1, 4, 8, 8)), Choice("ring", (32, 256, 4, 2, 4, 8)),
        Choice("ring", (32, 256, 4, 2, 4, 8)), Choice("loop", (64, 128, 4, 5, 0)),
    ),
    (8192, 2048, True): (
        Choice("gemv", (4, 4)), Choice("loop", (64, 128, 1, 5, 0)), Choice("loop", (128, 128, 1, 6, 0)),
        Choice("loop", (128, 128, 1, 6, 0)), Choice("loop", (64, 128, 1, 3, 0)),
    ),
    (2048, 8192, False): (
        Choice("gemv", (2, 4)), Choice("ring", (16, 512, 2, 4, 8, 8)), Choice("loop", (64, 128, 4, 5, 0)),
        Choice("loop", (64, 128, 4, 5, 0)), Choice("loop", (64, 128, 4, 5, 0)),
    ),
    (6144, 4096, False): (
        Choice("gemv", (4, 4)), Choice("ring", (8, 512, 1, 8, 4, 4)), Choice("loop", (64, 128, 1, 6, 0)),
        Choice("loop", (64, 128, 1, 6, 0)), Choice("loop", (64, 128, 1, 6, 0)),
    ),
    (4096, 4096, False): (
        Choice("gemv", (4, 4)), Choice("ring", (64, 256, 2, 5, 4, 4)), Choice("ring", (64, 256, 2, 5, 4, 8)),
        Choice("ring", (64, 256, 2, 5, 4, 8)), Choice("loop", (64, 64, 2, 8, 0)),
    ),
    (14336, 4096, True): (
        Choice("gemv", (4, 4)), Choice("loop", (64, 128, 1, 4, 0)), Choice("loop", (64, 128, 1, 4, 0)),
        Choice("loop", (64, 128, 1, 4, 0)), Choice("loop", (128, 128, 1, 6, 0)),
    ),
    (4096, 14336, False): (
        Choice("gemv", (2, 4)), Choice("loop", (64, 128, 2, 6, 0)), Choice("loop", (64, 128, 2, 6, 0)),
        Choice("loop", (64, 128, 2, 6, 0)), Choice("loop", (64, 64, 2, 8, 0)),
    ),
}  # fmt: skip


def power_of_two_divisor(n: int, limit: int) -> int:
    """The largest power of two that divides ``n``, at most ``limit`` (a power of two)."""
    return min(n & -n, limit)


def default_choice(shape: LinearShape, num_tokens: int, has_gluon: bool) -> Choice:
    """The blocks for a shape, measured or by rule."""
    index = CLASSES.index(token_class(num_tokens))
    measured = MEASURED.get((shape.N, shape.K, shape.activation > 0))
    if measured is not None:
        choice = measured[index]
        if has_gluon or choice.kernel not in NEED_GLUON:
            return choice
    if index == 0:
        if has_gluon and shape.K < 2048 and fits_gluon(shape, 2, 4):
            return Choice("gluon", (2, 4))
        return Choice("gemv", (_gemv_rows(shape.K), 4))
    if index in (1, 2) and shape.weight_rows * shape.K <= 1 << 22 and fits_rows(shape, 16, 4):
        return Choice("rows", (16, 4))
    return Choice("loop", _loop_blocks(shape))


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


def fits_gluon(shape: LinearShape, rows_a_warp: int, warps: int) -> bool:
    """Whether rows divide evenly and a thread can hold them; columns go in chunks of 256 at least."""
    held = rows_a_warp * shape.K * (2 if shape.activation else 1) // 32
    return shape.N % (rows_a_warp * warps) == 0 and shape.K % 256 == 0 and held <= 256


def fits_rows(shape: LinearShape, rows: int, warps: int) -> bool:
    """Whether the whole-rows kernel for few tokens can hold its rows in registers."""
    chunk = _chunk(shape.K)
    return chunk // warps >= 16 and rows * shape.K // (32 * warps) <= 128 and rows % 8 == 0


def _chunk(columns: int) -> int:
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
    wide, steps = _padded(most_tokens), shape.K // split // width
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


def fits_tile(shape: LinearShape, blocks: tuple[int, ...]) -> bool:
    """Whether ``(rows, columns a step, splits, stages of weights, of tokens)`` cover the shape and fit the chip.

    A stage is asked for again behind the step after its own, so there are two where there are fewer than steps.
    """
    rows, width, split, weight_stages, token_stages = blocks
    covers = rows in (16, 32, 64, 128) and width in (64, 128)
    if not covers or shape.weight_rows % rows or shape.K % (split * width):
        return False
    steps = shape.K // split // width
    held = (weight_stages * rows + token_stages * MAX_TOKENS) * width * 2
    is_served = all(min(steps, 2) <= stages <= steps for stages in (weight_stages, token_stages))
    return is_served and max(held, MAX_TOKENS * rows * 4) <= 225 << 10


def _tile_candidates(shape: LinearShape) -> Iterator[Choice]:
    """Tiles of which one or two fit a multiprocessor, with as few splits as keep most of the chip busy."""
    seen = set()
    for rows in (32, 64, 128):
        for split in (1, 2, 4, 8):
            programs, steps = shape.weight_rows // rows * split, shape.K // split // 128
            if not 64 <= programs <= 1056 or (split > 1 and programs > 300) or not steps:
                continue
            for held, token_stages in ((112, 3), (224, 4), (224, 6)):
                token_stages = min(steps, token_stages)
                weight_stages = min(steps, ((held << 10) - token_stages * MAX_TOKENS * 256) // (rows * 256))
                blocks = (rows, 128, split, weight_stages, token_stages)
                if blocks not in seen and weight_stages >= min(steps, 2) and fits_tile(shape, blocks):
                    seen.add(blocks)
                    yield Choice("tile", blocks)


def candidates(shape: LinearShape, num_tokens: int, has_gluon: bool) -> Iterator[Choice]:
    """What is worth measuring for a shape."""
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
        return
    if has_gluon:
        yield from _tile_candidates(shape)
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
                if programs // split * 2 > 132 and (
                    width == 64 or split > 2
                ):  # rows alone nearly fill the chip
                    continue
                yield Choice("loop", (tall, width, split, 6 if width == 128 else 8, 0))
                if width == 128 and programs > 132:
                    yield Choice("loop", (tall, width, split, 3, 0))


class DecodeLinear:
    """Launches linear layers of a decode step, each with the blocks chosen for its shape.

    Args:
        device: where the tensors are.
        has_gluon: whether kernels for sm_90 run there.
        uses_pdl: launch each kernel while the one before it ends.
        table: choices of this machine by ``(shape, class of tokens)``, see ``decode_table``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        has_gluon: bool = False,
        uses_pdl: bool = False,
        table: dict[tuple[LinearShape, int], Choice] | None = None,
    ):
        self.has_gluon = has_gluon
        self.uses_pdl = uses_pdl
        self._table = table or {}
        self._workspace = Workspace(
            torch.zeros(0, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(0, dtype=torch.float32, device=device),
        )

    def choice(self, shape: LinearShape, num_tokens: int) -> Choice:
        return self._table.get((shape, token_class(num_tokens))) or default_choice(
            shape, num_tokens, self.has_gluon
        )

    def reserve(self, shapes: list[LinearShape], max_tokens: int = MAX_TOKENS) -> None:
        """Make room for the partial sums of every shape; before anything is recorded."""
        size, tiles = 0, 1
        for shape in shapes:
            for num_tokens in CLASSES[1:]:
                num_tokens = min(num_tokens, max_tokens)
                choice = self.choice(shape, num_tokens)
                for one in (choice, _without_scaled(choice, shape)):
                    if one.kernel not in ("loop", "ring", "tile"):
                        continue
                    tall, _, split = one.blocks[:3]
                    num_tiles = triton.cdiv(shape.weight_rows, tall)
                    if split > 1:
                        size = max(size, num_tiles * split * (tall + 1) * _padded(num_tokens))
                        tiles = max(tiles, num_tiles)
        space = self._workspace
        num_shares = max(triton.cdiv(shape.weight_rows, 8) for shape in shapes) * _padded(max_tokens)
        if num_shares > len(space.shares):
            space.shares = space.shares.new_zeros(num_shares)
        if size > len(space.partial):
            space.partial = space.partial.new_zeros(size)
        if tiles > len(space.arrivals):
            space.arrivals = space.arrivals.new_zeros(tiles)

    def __call__(
        self,
        x: torch.Tensor,
        layer: LinearArguments,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        choice: Choice | None = None,
        is_first: bool = False,
        scaled: Scaled | None = None,
        next_norm: torch.Tensor | None = None,
        next_x: torch.Tensor | None = None,
    ) -> Scaled | None:
        """``out = residual + act(norm(x) @ weight^T + bias)``.

        Args:
            x: ``[M, K]``, M up to ``MAX_TOKENS``; all tensors contiguous.
            out: ``[M, N]``; may be ``residual``.
            choice: overrides the table.
            is_first: what the kernels before this one wrote is complete for all kernels behind it. Kernels for one
                token still load their weights meanwhile, others are launched without dependence.
            scaled: of the launch that wrote ``x``: the layer's norm then is half done.
            next_norm: the norm's weight ``[N]`` of the launch behind; with it ``next_x [M, N]`` is written.

        Returns:
            What the launch behind may take as ``scaled``; None where this kernel leaves nothing.
        """
        num_tokens = len(x)
        shape = layer.shape
        choice = choice or self.choice(shape, num_tokens)
        if layer.norm is not None and scaled is None:
            choice = _without_scaled(choice, shape)
        launch = _LAUNCHES[choice.kernel]
        uses_pdl = self.uses_pdl
        if choice.kernel in ("gemv", "gluon"):
            launch(x, layer, out, residual, choice.blocks, shape, uses_pdl, uses_pdl and is_first)
            return None
        uses_pdl = uses_pdl and not is_first
        launch(
            self._workspace,
            x,
            layer,
            out,
            residual,
            choice.blocks,
            shape,
            uses_pdl,
            scaled,
            next_norm,
            next_x,
        )
        if next_norm is None:
            return None
        return Scaled(next_x, triton.cdiv(shape.weight_rows, choice.blocks[0]))


def token_class(num_tokens: int) -> int:
    """The class of ``CLASSES`` that choices for ``num_tokens`` are kept by."""
    return next(most for most in CLASSES if num_tokens <= most)


def _without_scaled(choice: Choice, shape: LinearShape) -> Choice:
    """What serves a norm that no launch did half of: values of tiles pass no registers in which it could be taken."""
    return Choice("loop", _loop_blocks(shape)) if choice.kernel == "tile" else choice


def _padded(num_tokens: int) -> int:
    return max(16, triton.next_power_of_2(num_tokens))


def _launch_gemv(x, layer, out, residual, blocks, shape, uses_pdl, is_first) -> None:
    rows, warps = blocks
    if shape.activation:
        rows = max(rows, 2)
    per_program = rows // 2 if shape.activation else rows
    decode_gemv.gemv[(triton.cdiv(shape.N, per_program),)](
        x, layer.norm, layer.weight, layer.bias, residual, out, layer.eps, shape.N,
        K=shape.K, ROWS=rows, BK=power_of_two_divisor(shape.K, 4096), **layer.flags(residual, uses_pdl),
        IS_FIRST=is_first, num_warps=warps, **pdl_options(uses_pdl),
    )  # fmt: skip


def _launch_gluon(x, layer, out, residual, blocks, shape, uses_pdl, is_first) -> None:
    from atom.kernels.triton import decode_gemv_gluon

    rows, warps = blocks
    decode_gemv_gluon.gemv_rows[(shape.N // (rows * warps),)](
        x, layer.norm, layer.weight, layer.bias, residual, out, layer.eps, shape.N,
        K=shape.K, RPW=rows, BK=power_of_two_divisor(shape.K, 1024), NW=warps, **layer.flags(residual, uses_pdl),
        IS_FIRST=is_first, num_warps=warps, **pdl_options(uses_pdl),
    )  # fmt: skip


def _num_shares(scaled: Scaled | None) -> int:
    return 0 if scaled is None else scaled.num_shares


def _norm_options(scaled: Scaled | None, next_norm: torch.Tensor | None) -> dict[str, Any]:
    return {"IS_SCALED": scaled is not None, "HAS_NEXT": next_norm is not None}


def _launch_loop(
    workspace, x, layer, out, residual, blocks, shape, uses_pdl, scaled=None, next_norm=None, next_x=None
) -> None:
    tall, width, split, stages, ahead = blocks
    wide = _padded(len(x))
    stages = min(stages, shape.K // split // width + 1, 200_000 // (width * (tall + wide) * x.element_size()))
    decode_gemm.gemm_loop[(triton.cdiv(shape.weight_rows, tall), split)](
        x if scaled is None else scaled.x, layer.norm, layer.weight, layer.bias, residual, out, workspace.shares,
        next_norm, next_x, workspace.shares, workspace.partial, workspace.arrivals, layer.eps,
        _num_shares(scaled), len(x), shape.N,
        K=shape.K, BN=tall, BM=wide, BK=width, SPLIT=split, AHEAD=ahead, **layer.flags(residual, uses_pdl),
        **_norm_options(scaled, next_norm), num_warps=4, num_stages=max(1, stages), **pdl_options(uses_pdl),
    )  # fmt: skip


def _launch_rows(
    workspace, x, layer, out, residual, blocks, shape, uses_pdl, scaled=None, next_norm=None, next_x=None
) -> None:
    rows, warps = blocks
    decode_gemm.gemm_rows[(triton.cdiv(shape.weight_rows, rows),)](
        x if scaled is None else scaled.x, layer.norm, layer.weight, layer.bias, residual, out, workspace.shares,
        next_norm, next_x, workspace.shares, layer.eps, _num_shares(scaled), len(x), shape.N,
        K=shape.K, CHUNK=_chunk(shape.K), BN=rows, BM=_padded(len(x)), SLICES=warps,
        **_norm_options(scaled, next_norm), **layer.flags(residual, uses_pdl), num_warps=warps, **pdl_options(uses_pdl),
    )  # fmt: skip


def _launch_tile(
    workspace, x, layer, out, residual, blocks, shape, uses_pdl, scaled=None, next_norm=None, next_x=None
) -> None:
    rows, width, split, weight_stages, token_stages = blocks
    nowhere = [[0, 0]] * (split.bit_length() - 1)  # all programs of a cluster have tiles of one form
    flat = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=nowhere)
    tokens = x if scaled is None else scaled.x
    per_program = rows // 2 if layer.activation else rows
    decode_gemm_tile_gluon.gemm_tile[(shape.weight_rows // rows,)](
        TensorDescriptor(tokens, list(tokens.shape), [shape.K, 1], [MAX_TOKENS, width], flat),
        TensorDescriptor(layer.weight, list(layer.weight.shape), [shape.K, 1], [per_program, width], flat),
        layer.bias, residual, out, workspace.shares, next_norm, next_x, workspace.shares, workspace.partial,
        layer.eps, _num_shares(scaled), len(x), shape.N,
        K=shape.K, BN=rows, BM=_padded(len(x)), BK=width, SPLIT=split, W_STAGES=weight_stages,
        X_STAGES=token_stages, **layer.flags(residual, uses_pdl), HAS_NEXT=next_norm is not None,
        num_warps=4, num_ctas=split, **pdl_options(uses_pdl),
    )  # fmt: skip


def _launch_ring(
    workspace, x, layer, out, residual, blocks, shape, uses_pdl, scaled=None, next_norm=None, next_x=None
) -> None:
    from atom.kernels.triton import decode_gemm_gluon

    rows, width, split, stages, slices, warps = blocks
    decode_gemm_gluon.gemm_ring[(shape.weight_rows // rows, split)](
        x if scaled is None else scaled.x, layer.norm, layer.weight, layer.bias, residual, out, workspace.shares,
        next_norm, next_x, workspace.shares, workspace.partial, workspace.arrivals, layer.eps,
        _num_shares(scaled), len(x), shape.N,
        K=shape.K, BN=rows, BM=_padded(len(x)), BK=width, SPLIT=split, STAGES=stages, SLICES=slices, NW=warps,
        **layer.flags(residual, uses_pdl), **_norm_options(scaled, next_norm), num_warps=warps,
        **pdl_options(uses_pdl),
    )  # fmt: skip


_LAUNCHES = {
    "gemv": _launch_gemv,
    "gluon": _launch_gluon,
    "loop": _launch_loop,
    "rows": _launch_rows,
    "ring": _launch_ring,
    "tile": _launch_tile,
}


@dataclass(slots=True)
class HeadBuffers:
    """What the head writes: ``hidden [n, K]``, ``logits [n, N]``, ``keys [n]`` int64; ``flags [2]`` int32 it reads."""

    hidden: torch.Tensor
    logits: torch.Tensor
    keys: torch.Tensor
    flags: torch.Tensor


def head(
    x: torch.Tensor,
    layer: LinearArguments,
    buffers: HeadBuffers,
    num_programs: int = 0,
    uses_pdl: bool = False,
) -> None:
    """Logits of ``x [M, K]`` behind the final norm, and for each token the key of the best one.

    Keys are raised, so they must lie below all others before. Logits are written where ``flags[0]`` is not 0; ids
    from ``flags[1]`` on are never chosen.

    Args:
        layer: the head's weight and the final norm.
        num_programs: of the kernel for one token; 0 chooses.
    """
    num_tokens, columns = x.shape
    num_rows = len(layer.weight)
    options = {"PDL": uses_pdl, **pdl_options(uses_pdl)}
    if num_tokens == 1:
        rows, programs, warps = (2, 2112, 2) if columns <= 1024 else (2, 1056, 4)
        if columns > 2048:
            rows, programs, warps = (4 if columns <= 4096 else 2), 264, 8
        decode_gemv.head_gemv[(min(num_programs or programs, triton.cdiv(num_rows, rows)),)](
            x, layer.norm, layer.weight, buffers.hidden, buffers.logits, buffers.keys, buffers.flags,
            layer.eps, num_rows,
            K=columns, ROWS=rows, BK=power_of_two_divisor(columns, 4096), num_warps=warps, **options,
        )  # fmt: skip
        return
    from atom.kernels.triton.decode_step import final_norm

    final_norm(x, layer.norm, buffers.hidden, layer.eps, uses_pdl)
    tall, wide, width = 64, _padded(num_tokens), power_of_two_divisor(columns, 128)
    stages = min(5, columns // width + 1, 100_000 // (width * (tall + wide) * x.element_size()))
    decode_gemm.head_gemm[(triton.cdiv(num_rows, tall),)](
        buffers.hidden, layer.weight, buffers.logits, buffers.keys, buffers.flags, num_tokens, num_rows,
        K=columns, BN=tall, BM=wide, BK=width, AHEAD=0, num_warps=4, num_stages=max(1, stages), **options,
    )  # fmt: skip
