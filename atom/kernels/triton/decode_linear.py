"""The linear layers of a decode step: their launches, with the kernels and blocks of ``decode_choices``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom.kernels.triton import batch_linear, decode_gemm, decode_gemm_tile_gluon, decode_gemv
from atom.kernels.triton.batch_linear import BatchShape
from atom.kernels.triton.decode_choices import (
    BATCH_CLASSES,
    CLASSES,
    MAX_TOKENS,
    OF_ONE_TOKEN,
    Choice,
    LinearShape,
    chunk,
    default_choice,
    padded,
    power_of_two_divisor,
    token_class,
    without_scaled,
)
from atom.kernels.triton.decode_parts import pdl_options
from atom.kernels.triton.hopper import rows_there


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


class DecodeLinear:
    """Launches linear layers of a decode step, each with the blocks chosen for its shape.

    ``shares`` is where sums of squares lie between a launch and the next, ``[shares, padded tokens]`` fp32.

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

    @property
    def shares(self) -> torch.Tensor:
        return self._workspace.shares

    @property
    def num_bytes(self) -> int:
        """Of the workspace."""
        space = self._workspace
        return space.partial.nbytes + space.arrivals.nbytes + space.shares.nbytes

    def reserve(self, shapes: list[LinearShape], max_tokens: int = MAX_TOKENS) -> None:
        """Make room for the partial sums of every shape; before anything is recorded.

        Raises ValueError where no kernel serves a shape or ``max_tokens``.
        """
        size, tiles = 0, 1
        token_class(max_tokens)  # which says so
        for shape in shapes:
            for most in CLASSES[1:] + BATCH_CLASSES:
                num_tokens = min(most, max_tokens)
                choice = self.choice(shape, num_tokens)
                if choice.kernel == "batch":
                    blocks = BatchShape(*choice.blocks)
                    size = max(size, blocks.programs * blocks.groups * blocks.rows * blocks.tokens)
                    tiles = max(tiles, blocks.programs * blocks.groups)
                for one in (choice, without_scaled(choice, shape)):
                    if one.kernel not in ("loop", "ring", "tile"):
                        continue
                    tall, _, split = one.blocks[:3]
                    num_tiles = triton.cdiv(shape.weight_rows, tall)
                    if split > 1:
                        size = max(size, num_tiles * split * (tall + 1) * padded(num_tokens))
                        tiles = max(tiles, num_tiles)
        space = self._workspace
        num_shares = max(triton.cdiv(shape.weight_rows, 8) for shape in shapes) * padded(max_tokens)
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
            x: ``[M, K]``; all tensors contiguous.
            out: ``[M, N]``; may be ``residual``.
            choice: overrides the table.
            is_first: what the kernels before this one wrote is complete for all kernels behind it. Kernels for one
                token still load their weights meanwhile, others are launched without dependence.
            scaled: of the launch that wrote ``x``: the layer's norm then is half done.
            next_norm: the norm's weight ``[N]`` of the launch behind; with it ``next_x [M, N]`` is written.

        Returns:
            What the launch behind may take as ``scaled``; None where this kernel leaves nothing.

        Raises:
            ValueError: no kernel serves so many tokens, or none that takes the whole norm; or ``scaled`` and
                ``next_norm`` together: a launch would read shares where it writes the next norm's.
        """
        if scaled is not None and next_norm is not None:
            raise ValueError(
                f"scaled ({scaled.num_shares} shares of the norm before) and next_norm (of the norm behind) in one "
                "launch: it would write shares of sums of squares where it reads those of the launch before"
            )
        num_tokens = len(x)
        shape = layer.shape
        choice = choice or self.choice(shape, num_tokens)
        if layer.norm is not None and scaled is None:
            if choice.kernel == "batch":
                raise ValueError(f"the norm of {num_tokens} tokens is not half done by the launch before")
            choice = without_scaled(choice, shape)
        launch = _LAUNCHES[choice.kernel]
        uses_pdl = self.uses_pdl
        if choice.kernel in OF_ONE_TOKEN:
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


def _launch_mma(x, layer, out, residual, blocks, shape, uses_pdl, is_first) -> None:
    from atom.kernels.triton import decode_gemv_gluon

    rows, warps = blocks
    per_program = rows // 2 if shape.activation else rows
    decode_gemv_gluon.gemv_mma[(shape.N // per_program,)](
        x, layer.norm, layer.weight, layer.bias, residual, out, layer.eps, shape.N,
        K=shape.K, ROWS=rows, NW=warps, **layer.flags(residual, uses_pdl), IS_FIRST=is_first, num_warps=warps,
        maxnreg=128, **pdl_options(uses_pdl),  # with no limit the compiler has its own, and spills
    )  # fmt: skip


def _num_shares(scaled: Scaled | None) -> int:
    return 0 if scaled is None else scaled.num_shares


def _norm_options(scaled: Scaled | None, next_norm: torch.Tensor | None) -> dict[str, Any]:
    return {"IS_SCALED": scaled is not None, "HAS_NEXT": next_norm is not None}


def _launch_loop(
    workspace, x, layer, out, residual, blocks, shape, uses_pdl, scaled=None, next_norm=None, next_x=None
) -> None:
    tall, width, split, stages, ahead = blocks
    wide = padded(len(x))
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
        K=shape.K, CHUNK=chunk(shape.K), BN=rows, BM=padded(len(x)), SLICES=warps,
        **_norm_options(scaled, next_norm), **layer.flags(residual, uses_pdl), num_warps=warps, **pdl_options(uses_pdl),
    )  # fmt: skip


def _launch_tile(
    workspace, x, layer, out, residual, blocks, shape, uses_pdl, scaled=None, next_norm=None, next_x=None
) -> None:
    rows, width, split, weight_stages, token_stages, is_cluster = blocks
    cluster, wide = split if is_cluster else 1, padded(len(x))
    nowhere = [[0, 0]] * (cluster.bit_length() - 1)  # all programs of a cluster have tiles of one form
    flat = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=nowhere)
    tokens = x if scaled is None else scaled.x
    per_program = rows // 2 if layer.activation else rows
    decode_gemm_tile_gluon.gemm_tile[(shape.weight_rows // rows, split // cluster)](
        TensorDescriptor(tokens, [rows_there(tokens, wide), shape.K], [shape.K, 1], [wide, width], flat),
        TensorDescriptor(layer.weight, list(layer.weight.shape), [shape.K, 1], [per_program, width], flat),
        layer.bias, residual, out, workspace.shares, next_norm, next_x, workspace.shares, workspace.partial,
        workspace.arrivals, layer.eps, _num_shares(scaled), len(x), shape.N,
        K=shape.K, BN=rows, BM=wide, BK=width, SPLIT=split, CLUSTER=cluster, W_STAGES=weight_stages,
        X_STAGES=token_stages, **layer.flags(residual, uses_pdl), HAS_NEXT=next_norm is not None,
        num_warps=4, num_ctas=cluster, **pdl_options(uses_pdl),
    )  # fmt: skip


def _launch_batch(
    workspace, x, layer, out, residual, blocks, shape, uses_pdl, scaled=None, next_norm=None, next_x=None
) -> None:
    around = batch_linear.Around(
        None if layer.norm is None else workspace.shares, _num_shares(scaled), layer.eps, layer.bias, residual,
        next_norm, next_x, workspace.shares, padded(len(x)),
    )  # fmt: skip
    batch_linear.launch(
        batch_linear.BatchShape(*blocks),
        x if scaled is None else scaled.x,
        layer.weight,
        out,
        layer.activation,
        around=around,
        room=(workspace.partial, workspace.arrivals),
        uses_pdl=uses_pdl,
    )


def _launch_ring(
    workspace, x, layer, out, residual, blocks, shape, uses_pdl, scaled=None, next_norm=None, next_x=None
) -> None:
    from atom.kernels.triton import decode_gemm_gluon

    rows, width, split, stages, slices, warps = blocks
    decode_gemm_gluon.gemm_ring[(shape.weight_rows // rows, split)](
        x if scaled is None else scaled.x, layer.norm, layer.weight, layer.bias, residual, out, workspace.shares,
        next_norm, next_x, workspace.shares, workspace.partial, workspace.arrivals, layer.eps,
        _num_shares(scaled), len(x), shape.N,
        K=shape.K, BN=rows, BM=padded(len(x)), BK=width, SPLIT=split, STAGES=stages, SLICES=slices, NW=warps,
        **layer.flags(residual, uses_pdl), **_norm_options(scaled, next_norm), num_warps=warps,
        **pdl_options(uses_pdl),
    )  # fmt: skip


_LAUNCHES = {
    "gemv": _launch_gemv,
    "gluon": _launch_gluon,
    "mma": _launch_mma,
    "loop": _launch_loop,
    "rows": _launch_rows,
    "ring": _launch_ring,
    "tile": _launch_tile,
    "batch": _launch_batch,
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
    tall, wide, width = 64, padded(num_tokens), power_of_two_divisor(columns, 128)
    stages = min(5, columns // width + 1, 100_000 // (width * (tall + wide) * x.element_size()))
    decode_gemm.head_gemm[(triton.cdiv(num_rows, tall),)](
        buffers.hidden, layer.weight, buffers.logits, buffers.keys, buffers.flags, num_tokens, num_rows,
        K=columns, BN=tall, BM=wide, BK=width, AHEAD=0, num_warps=4, num_stages=max(1, stages), **options,
    )  # fmt: skip
