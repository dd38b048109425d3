"""The launch of a decode step's attention from the packed projection: which of four kernels, and how it is built.

| sequences | portable, ``fused_attention`` | on sm_90, in Gluon |
|---|---|---|
| very few | ``columns`` (``ColumnShape``) | ``grouped`` (``GroupedShape``) of ``fused_attention_few_gluon`` |
| batches | ``splits`` (``SplitShape``) | ``warp_splits`` (``WarpShape``) of ``fused_attention_batch_gluon`` |

Attention alone, its keys and values already in the cache, is ``decode_attention``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from atom.kernels.triton import fused_attention, fused_attention_batch_gluon, fused_attention_few_gluon
from atom.kernels.triton.decode_parts import pdl_options
from atom.kernels.triton.hopper import MULTIPROCESSORS

PROGRAMS = 2 * MULTIPROCESSORS  # which run at once
MAX_PROGRAMS = 2112  # whose partial results there is room for
SPLITS = (16, 8, 4, 2)
MAX_COLUMN_PROGRAMS = 264
LONG = 1024  # keys beyond which few sequences split them instead of the value columns
MAX_GROUPED_PROGRAMS = MULTIPROCESSORS  # of the kernel for sm_90


class ColumnShape(NamedTuple):
    """How the kernel for very few sequences is built: programs a query head, warps, keys of a tile, tiles ahead."""

    parts: int
    num_warps: int
    keys: int
    num_ahead: int


class GroupedShape(NamedTuple):
    """How the kernel for very few sequences on sm_90 is built: programs a kv head, warps, tiles ahead, registers.

    A tile has 16 keys a warp; registers of a thread are limited so that a program starts beside others.
    """

    parts: int
    num_warps: int
    num_ahead: int
    num_registers: int


class SplitShape(NamedTuple):
    """How the kernel for batches is built: programs a kv head, keys of a tile, warps, stages."""

    splits: int
    keys: int
    num_warps: int
    num_stages: int


class WarpShape(NamedTuple):
    """How the kernel for batches on sm_90 is built: programs a kv head, keys of a warp's tile, warps, tiles ahead.

    ``max_registers`` of a thread leave room for more programs on a multiprocessor; 0: as the compiler likes.
    """

    splits: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int


BatchShape = SplitShape | WarpShape


@dataclass(slots=True)
class AttentionLayer:
    """What does not change from step to step: ``qk_norm [heads + kv heads, head_dim]``, ``sinks [heads]`` and more."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary_dim: int
    rope: int  # which of the step's rotations is this layer's
    window: int | None = None
    soft_cap: float | None = None
    qk_norm: torch.Tensor | None = None
    eps: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class StepTables:
    """The sequences of a step; see ``AttentionMetaData``. cos and sin are ``[n, ropes, dim]``."""

    block_tables: torch.Tensor
    rows: torch.Tensor | None
    context_lens: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class DecodeAttention:
    """Launches attention from packed projections, and keeps the room for partial results.

    Args:
        max_tokens: the most sequences of a step.
        has_gluon: whether kernels for sm_90 run there.
        column_shape: how the portable kernel for very few sequences is built; None chooses, also between kernels.
        batch_shape: which kernel for batches serves any number of sequences, and how it is built; None chooses.
        grouped_shape: how the kernel for very few sequences on sm_90 is built; None chooses.
    """

    def __init__(
        self,
        device: torch.device,
        layers: list[AttentionLayer],
        max_tokens: int,
        uses_pdl: bool = False,
        has_gluon: bool = False,
        column_shape: ColumnShape | None = None,
        batch_shape: BatchShape | None = None,
        grouped_shape: GroupedShape | None = None,
    ):
        self.uses_pdl = uses_pdl
        self._has_gluon = has_gluon
        self._grouped_shape = grouped_shape
        self._column_shape = column_shape
        self._batch_shape = batch_shape
        size, groups = 1, 1
        for layer in layers:
            group = layer.num_heads // layer.num_kv_heads
            rows = max(MAX_PROGRAMS, layer.num_kv_heads * max_tokens) * group
            rows = max(rows, MAX_COLUMN_PROGRAMS)
            size = max(size, rows * layer.head_dim)
            groups = max(groups, layer.num_heads * max_tokens)
        self._partial = torch.zeros(size, dtype=torch.float32, device=device)
        self._stats = torch.zeros(2 * size // 16, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(groups, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Of the room for partial results."""
        return self._partial.nbytes + self._stats.nbytes + self._arrivals.nbytes

    def column_shape(self, layer: AttentionLayer, num_seqs: int) -> ColumnShape | None:
        """The kernel where keys are not to be split; None where they are."""
        shape = self._column_shape or column_shape(layer)
        return shape if layer.num_heads * shape.parts * num_seqs <= MAX_COLUMN_PROGRAMS else None

    def grouped_shape(
        self, layer: AttentionLayer, num_seqs: int, dtype: torch.dtype, cache: torch.Tensor
    ) -> GroupedShape | None:
        """The kernel for sm_90 where it serves the layer; None where another one does."""
        is_portable = not self._has_gluon or self._column_shape is not None
        if is_portable or not fits_grouped(layer, dtype, cache.dtype, cache.shape[2]):
            return None
        shape = self._grouped_shape or grouped_shape(layer)
        return shape if layer.num_kv_heads * shape.parts * num_seqs <= MAX_GROUPED_PROGRAMS else None

    def __call__(
        self,
        qkv: torch.Tensor,
        layer: AttentionLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
        step: StepTables,
        out: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        splits: int | None = None,
    ) -> None:
        """Store this step's keys and values and write its attention.

        Args:
            qkv: ``[n, (heads + 2 kv heads) * head_dim]``, as the projection wrote it.
            keys: ``[num_blocks, kv heads, block_size, head_dim]``, written at the slots; values alike.
            out: ``[n, heads * head_dim]``; zeros for a sequence of context length 0.
            scales: of the cache, key's and value's ``[1]`` fp32: what is stored is the value over its scale.
            splits: programs that share the keys of a kv head, whatever the number of sequences; None chooses.

        Raises:
            ValueError: there is no room for the partial results of so many splits.
        """
        num_seqs = len(qkv)
        is_batch = splits is not None or self._batch_shape is not None
        columns = None if is_batch else self.column_shape(layer, num_seqs)
        group = layer.num_heads // layer.num_kv_heads
        dim, page = layer.head_dim, keys.shape[2]
        grouped = None if is_batch else self.grouped_shape(layer, num_seqs, qkv.dtype, keys)
        first = (
            qkv, keys, values, step.block_tables, step.rows, step.context_lens, step.slots, step.cos, step.sin,
            layer.qk_norm, layer.sinks,
        )  # fmt: skip
        rest = (
            out, self._partial, self._stats, self._arrivals, layer.scale, layer.soft_cap or 0.0, layer.eps,
            step.block_tables.stride(0), layer.rope,
        )  # fmt: skip
        arguments = (*first, *(scales or (None, None)), *rest)
        options = {
            "HAS_ROWS": step.rows is not None,
            "HAS_NORM": layer.qk_norm is not None,
            "HAS_SINKS": layer.sinks is not None,
            "HAS_SOFT_CAP": layer.soft_cap is not None,
            "WINDOW": layer.window or 0,
            "KV_HEADS": layer.num_kv_heads,
            "GROUP": group,
            "PAGE": page,
            "DIM": dim,
            "ROTARY": layer.rotary_dim,
            "ROTARY_PAD": step.cos.shape[2],
            "ROPES": step.cos.shape[1],
            "PDL": self.uses_pdl,
            **pdl_options(self.uses_pdl),
        }
        if grouped is not None:
            fused_attention_few_gluon.grouped[(layer.num_kv_heads, grouped.parts, num_seqs)](
                *arguments, **options, HAS_SCALES=scales is not None,
                PARTS=grouped.parts, AHEAD=grouped.num_ahead, LONG=LONG, ROWS=triton.next_power_of_2(group + 1),
                NW=grouped.num_warps, num_warps=grouped.num_warps, maxnreg=grouped.num_registers,
            )  # fmt: skip
            return
        if columns is not None:
            fused_attention.columns[(layer.num_heads, columns.parts, num_seqs)](
                *arguments, **options, HAS_SCALES=scales is not None,
                PARTS=columns.parts, TILE=columns.keys, AHEAD=columns.num_ahead, LONG=LONG,
                num_warps=columns.num_warps, num_stages=1,
            )  # fmt: skip
            return
        is_plain = scales is None and keys.dtype is qkv.dtype and page % 16 == 0
        shape = self._batch_shape or batch_shape(layer, num_seqs, self._has_gluon)
        if isinstance(shape, WarpShape) and not is_plain:
            shape = split_shape(layer, num_seqs)
        if splits is not None:
            shape = shape._replace(splits=splits)
        num_programs = layer.num_kv_heads * num_seqs * shape.splits
        if shape.splits > 1 and num_programs > MAX_PROGRAMS:
            raise ValueError(
                f"{num_seqs} sequences of {layer.num_kv_heads} kv heads in {shape.splits} splits are "
                f"{num_programs} programs, more than {MAX_PROGRAMS}"
            )
        grid = (layer.num_kv_heads, num_seqs, shape.splits)
        if isinstance(shape, WarpShape):
            if shape.max_registers:
                options["maxnreg"] = shape.max_registers
            fused_attention_batch_gluon.warp_splits[grid](
                *first, *rest, **options,
                MEMBERS=triton.next_power_of_2(group), N=max(8, triton.next_power_of_2(group)),
                PIECES=triton.next_power_of_2(group + 2), SPLITS=shape.splits, SHARE=shape.keys,
                STAGES=shape.num_stages, NW=shape.num_warps, num_warps=shape.num_warps,
            )  # fmt: skip
            return
        fused_attention.splits[grid](
            *arguments, **options, HAS_SCALES=scales is not None,
            GROUP_PAD=max(16, triton.next_power_of_2(group)), SPLITS=shape.splits, TILE=shape.keys,
            num_warps=shape.num_warps, num_stages=shape.num_stages,
        )  # fmt: skip


def batch_shape(layer: AttentionLayer, num_seqs: int, has_gluon: bool) -> BatchShape:
    """The kernel for a batch. It depends on shapes alone, so a graph can hold it."""
    return warp_shape(layer, num_seqs) if has_gluon else split_shape(layer, num_seqs)


def warp_shape(layer: AttentionLayer, num_seqs: int) -> WarpShape:
    """Two programs a multiprocessor, each with several tiles of keys and values on their way; splits while they fit.

    Measured with 8 kv heads of 128 and 64, 8 to 256 sequences (``python -m atom.benchmarks.decode_chain --attention``):
    programs of a tile, of which four run at a time, are as good where they just fill the device, and up to 12 %
    slower where a few groups are left over.
    """
    num_groups = num_seqs * layer.num_kv_heads
    splits = next((s for s in SPLITS if num_groups * s <= PROGRAMS), 1)
    if layer.head_dim <= 64 and num_groups >= 64:
        return WarpShape(1, 16, 8, 4, 128) if num_groups < 128 else WarpShape(1, 16, 4, 2, 128)
    if layer.head_dim == 128 and 512 <= num_groups <= 4 * MULTIPROCESSORS:
        return WarpShape(1, 16, 4, 1, 128)
    return WarpShape(splits, 16, 4, max(1, min(4, 384 // layer.head_dim)), 0)


def split_shape(layer: AttentionLayer, num_seqs: int) -> SplitShape:
    """The portable kernel for a batch: few sequences gain from more programs than run at once.

    From 256 groups on one program a group was the fastest.
    """
    num_groups = num_seqs * layer.num_kv_heads
    limit = 2 * PROGRAMS if num_groups <= PROGRAMS // 2 else PROGRAMS
    splits = next((s for s in SPLITS if num_groups * s <= limit), 1)
    return SplitShape(splits, 32 if layer.head_dim > 128 else 64, 4, 3)


def column_shape(layer: AttentionLayer) -> ColumnShape:
    """The kernel for very few sequences; measured with 16 and 32 heads of 128 and 32 of 64."""
    if layer.head_dim > 128:
        return ColumnShape(4, 16, 64, 4)
    if layer.head_dim <= 64:
        return ColumnShape(4, 16, 128, 3)
    return ColumnShape(4, 8, 64, 6) if layer.num_heads <= 16 else ColumnShape(2, 16, 128, 3)


def fits_grouped(layer: AttentionLayer, dtype: torch.dtype, cache_dtype: torch.dtype, page: int) -> bool:
    """Whether the kernel for sm_90 can serve a layer: 16-bit numbers, in the cache too, up to 8 query heads a group."""
    group = layer.num_heads // layer.num_kv_heads
    is_power = group & (group - 1) == 0 and page & (page - 1) == 0
    is_half = dtype.itemsize == 2 and cache_dtype == dtype
    return is_power and group <= 8 and layer.head_dim in (64, 128) and is_half


def grouped_shape(layer: AttentionLayer) -> GroupedShape:
    """The kernel for very few sequences on sm_90: three tiles are 384 keys; so many registers do without spills.

    Beside products by tensor cores, programs of twice the value columns are better: they leave more of the chip to
    them. With four query heads a kv head that was not measured.
    """
    if layer.head_dim <= 64:
        return GroupedShape(4, 8, 3, 144)
    return (
        GroupedShape(4, 8, 3, 224)
        if layer.num_heads <= 2 * layer.num_kv_heads
        else GroupedShape(8, 8, 3, 208)
    )
