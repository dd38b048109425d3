"""Rounding of weights to few bits, in torch: what the packed formats of every device must reproduce.

Symmetric throughout: ``value = scale * q``. A value is off by at most half a scale in int8, ``amax / 254``; in int4 by
half a scale inside the range and one and a half at its ends, where that makes the others better.
"""

from __future__ import annotations

import torch

_TINY = 1e-30
# Where the value of the largest magnitude may be put, in steps; the best of them is kept.
INT4_EXTREMES = (-8.0, -7.5, -7.0, -8.5, 7.0, 7.5)


def quantize_int8(weight: torch.Tensor, group_size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row, or per group along k: ``(q [n, k] int8, scale [n, groups] fp32)``; ``scale = amax / 127``.

    Raises:
        ValueError: k is no multiple of the group.
    """
    groups = _groups(weight, group_size)
    scale = groups.abs().amax(dim=-1) / 127.0
    q = (groups / scale.clamp_min(_TINY)[..., None]).round_().clamp_(-127, 127)
    return q.to(torch.int8).view(weight.shape), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``scale [n, groups] * q [n, k]`` in fp32."""
    n, k = q.shape
    return (q.view(n, scale.shape[1], -1).float() * scale.float()[..., None]).view(n, k)


def quantize_int4(weight: torch.Tensor, group_size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Per group of ``group_size`` along k: ``(q [n, k] int8 in -8..7, scale [n, k / group_size] bf16)``.

    Of :data:`INT4_EXTREMES` each group takes the scale with the smallest squared error.

    Raises:
        ValueError: k is no multiple of the group.
    """
    n, k = weight.shape
    groups = _groups(weight, group_size)
    largest = groups.abs().argmax(dim=-1, keepdim=True)
    extreme = groups.gather(-1, largest)
    best_error = torch.full_like(extreme, torch.inf)
    best_scale, best_q = torch.zeros_like(extreme), torch.zeros_like(groups)
    for steps in INT4_EXTREMES:
        scale = (extreme / steps).bfloat16().float()
        is_usable = scale.abs() > _TINY
        q = (groups / torch.where(is_usable, scale, 1.0)).clamp_(-8, 7).round_()
        error = (q * scale - groups).square_().sum(dim=-1, keepdim=True)
        is_better = is_usable & (error < best_error)
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        best_q = torch.where(is_better, q, best_q)
    return best_q.to(torch.int8).view(n, k), best_scale.bfloat16().view(n, -1)


def fake_quantize(weight: torch.Tensor, weight_bits: int, group_size: int = 0) -> torch.Tensor:
    """``weight`` rounded to the format and back, in its dtype."""
    if weight_bits == 8:
        return dequantize(*quantize_int8(weight, group_size)).to(weight.dtype)
    if weight_bits == 4:
        return dequantize(*quantize_int4(weight, group_size)).to(weight.dtype)
    raise ValueError(f"weight_bits must be 4 or 8, got {weight_bits}")


def _groups(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """``weight [n, k]`` as ``[n, groups, group_size]`` fp32; 0: a group a row."""
    n, k = weight.shape
    if group_size and k % group_size:
        raise ValueError(f"in_features must be a multiple of the group of {group_size}, got {k}")
    return weight.float().view(n, -1, group_size or k)


def to_q8_0(rows: torch.Tensor) -> torch.Tensor:
    """``rows [n, k]`` as GGUF's Q8_0 blocks ``[n, k / 32 * 34]`` uint8: an fp16 scale, then 32 int8.

    Raises:
        ValueError: k is no multiple of 32.
    """
    n, k = rows.shape
    if k % 32:
        raise ValueError(f"in_features must be a multiple of 32, got {k}")
    groups = rows.float().view(-1, 32)
    scale = (groups.abs().amax(dim=-1, keepdim=True) / 127.0).half()
    q = (groups / scale.float().clamp_min(_TINY)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scale.view(torch.uint8), q.view(torch.uint8)), dim=-1).view(n, -1)
