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
