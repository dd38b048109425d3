"""Rotary position embedding of the half-split (NeoX) form."""

import torch

from atom.kernels.registry import register_kernel


@register_kernel("rotary", "reference")
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` channels of each head; the rest pass through.

    Args:
        x: ``[num_tokens, num_heads, head_dim]``.
        cos: ``[num_tokens, 1, rotary_dim]``, both halves alike.
        sin: ``[num_tokens, 1, rotary_dim]``, the first half negated, so that the rotation of the pair
            ``(x[i], x[i + rotary_dim / 2])`` is ``x * cos + swapped_halves(x) * sin``.
    """
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos.float() + torch.cat((second, first), dim=-1) * sin.float()
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)
