"""What launches for sm_90 share: how many programs run at a time, and what the copy engine can bring and how."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from atom.platforms import platform_of_device

# Of an H200, where choices were measured; other chips of sm_90, and parts of one, have fewer.
MULTIPROCESSORS = 132


@cache
def num_at_once(device: torch.device) -> int:
    """How many programs that fill a multiprocessor run at a time on ``device``: an H200's where nothing runs."""
    if device.type != "cuda":  # launches are recorded
        return MULTIPROCESSORS
    return platform_of_device(device).num_multiprocessors(device.index or 0)


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a launch on ``device`` may start while the one before it ends."""
    return device.type == "cuda" and platform_of_device(device).architecture() == "sm_90"


@cache
def shared_layout(rank: int = 2, row_bytes: int = 128) -> Any:
    """Of tiles of 16-bit numbers that are brought or written in bulk, in rows of 32, 64 or 128 bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=row_bytes, element_bitwidth=16, rank=rank)


def can_bring(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether tiles of ``x [num_tokens, K]`` and ``weight [N, K]`` can be brought: they begin at 16-byte multiples."""
    return (
        x.dim() == 2
        and x.dtype is weight.dtype
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and weight.is_contiguous()
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def rows_there(x: torch.Tensor, most: int) -> int:
    """Up to ``most`` rows of ``x [num_tokens, K]`` that can be read: those behind the last too, where its room goes on.

    The copy engine is slow where it has to fill in zeros: products of few rows took a fifth longer.
    """
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return min(most, (room - x.shape[1]) // x.stride(0) + 1)
