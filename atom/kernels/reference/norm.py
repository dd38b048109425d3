"""Root-mean-square norms in fp32 with one rounding at the end."""

import torch

from atom.kernels.registry import register_kernel


@register_kernel("rms_norm", "reference")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, in x's dtype.

    ``weight [size]`` is the effective factor in fp32: Gemma's stored ``w`` arrives here as ``1 + w``.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@register_kernel("add_rms_norm", "reference")
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total = x + residual`` (rounded to their dtype) and its norm: ``(norm, total)``."""
    # Added in fp32, which rounds alike: Inductor makes x + residual part of the product before it, as addmm, and that
    # copies the residual to its output first. A pass of its own over both costs less.
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total
