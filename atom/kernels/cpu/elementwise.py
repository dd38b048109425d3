"""Norm, rotation and activations with as few passes and launches as torch allows.

A launch costs 1-2 us, which at one token is all there is; rounding follows the model's dtype where the
reference stays in fp32, as transformers does.
"""

from functools import cache

import torch
import torch.nn.functional as F

from atom.kernels.registry import register_kernel

_PRIORITY = {"cpu": 10}


@cache
def _scalar(value: float) -> torch.Tensor:
    """A constant as a tensor; a Python number would be wrapped anew in each call, which costs 2 us."""
    return torch.tensor(value, dtype=torch.float32)


@register_kernel("rms_norm", "torch_cpu", priority=_PRIORITY, is_traceable=False)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``reference.norm.rms_norm``; one fp32 copy of x is worked on in place."""
    wide = x.float() if x.dtype is not torch.float32 else x.clone()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    factor = torch.addcmul(_scalar(eps), length, length, value=1.0 / x.shape[-1]).rsqrt_()
    return wide.mul_(factor).mul_(weight).to(x.dtype)


@register_kernel("rotary", "torch_cpu", priority=_PRIORITY, is_traceable=False)
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See ``reference.rotary.rotary``; in x's dtype, which cos and sin share."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(rotary_dim // 2, -1), sin)
    rotated = x[..., :rotary_dim]
    rotated = torch.addcmul(rotated * cos, rotated.roll(rotary_dim // 2, -1), sin)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


@register_kernel("silu_and_mul", "torch_cpu", priority=_PRIORITY, is_traceable=False)
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``reference.activation.silu_and_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@register_kernel("gelu_tanh_and_mul", "torch_cpu", priority=_PRIORITY, is_traceable=False)
def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``reference.activation.gelu_tanh_and_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
