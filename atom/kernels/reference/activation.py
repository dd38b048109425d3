"""Gated activations over a packed ``[gate | up]`` row."""

import torch
import torch.nn.functional as F

from atom.kernels.registry import register_kernel


@register_kernel("silu_and_mul", "reference")
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up [num_tokens, 2 * size]``: ``[num_tokens, size]``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@register_kernel("gelu_tanh_and_mul", "reference")
def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation of GELU: ``[num_tokens, size]``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
