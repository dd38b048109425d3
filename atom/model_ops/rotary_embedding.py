"""Rotary position embedding: inverse frequencies from a configuration, and cos/sin rows of a step.

Frequencies follow transformers' ``modeling_rope_utils`` (default, linear, llama3, yarn). ``dynamic`` changes
nothing up to ``max_position_embeddings``, and an engine serves no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from atom.errors import ConfigError
from atom.kernels.registry import select_kernel

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: [num_tokens, 1, rotary_dim], see kernel "rotary"


class RotaryEmbedding(nn.Module):
    """cos and sin of a step's positions, computed once a step and shared by the layers.

    No table is kept: a row costs less to compute than a table of 131,072 positions costs to hold.
    """

    def __init__(self, inv_freq: torch.Tensor, attention_factor: float = 1.0):
        super().__init__()
        device, half = torch.get_default_device(), torch.full_like(inv_freq, attention_factor)
        # Frequencies are the same whatever the checkpoint says, so they are no part of it. Moved last: on the meta
        # device cat imports Dynamo, a second.
        self.register_buffer("inv_freq", torch.cat((inv_freq, inv_freq)).to(device), persistent=False)
        self.register_buffer("sign", torch.cat((-half, half)).to(device), persistent=False)
        self.attention_factor = attention_factor
        self.rotary_dim = 2 * len(inv_freq)
        self._rotate = select_kernel("rotary", rotary_dim=self.rotary_dim)

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin for ``positions [num_tokens]`` in ``dtype``."""
        angles = positions.to(torch.float32)[:, None, None] * self.inv_freq
        cos = angles.cos()
        if self.attention_factor != 1.0:
            cos *= self.attention_factor
        return cos.to(dtype), (angles.sin() * self.sign).to(dtype)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate ``x [num_tokens, num_heads, head_dim]``."""
        return self._rotate(x, *rotation)


def get_rope(head_dim: int, rope_parameters: Mapping[str, Any], max_position: int) -> RotaryEmbedding:
    """The embedding that normalised ``rope_parameters`` describe.

    Args:
        rope_parameters: ``rope_type``, ``rope_theta`` and what the type needs.
        max_position: ``max_position_embeddings`` of the configuration.

    Raises:
        ConfigError: an unknown ``rope_type``, or a parameter that it needs is missing.
    """
    kind = rope_parameters.get("rope_type", "default")
    if kind not in _SCALINGS:
        raise ConfigError(f"rope_type: {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    rotary_dim = int(head_dim * rope_parameters.get("partial_rotary_factor", 1.0))
    try:
        inv_freq, attention_factor = _SCALINGS[kind](rotary_dim, rope_parameters, max_position)
    except KeyError as error:
        raise ConfigError(f"rope_parameters: rope_type {kind!r} needs {error.args[0]!r}") from error
    return RotaryEmbedding(inv_freq, attention_factor)


def _exponents(dim: int) -> torch.Tensor:
    # On the CPU whatever the default device is: on the meta device a float arange imports Dynamo, a second.
    return torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim


def _default(dim: int, rope: Mapping[str, Any], max_position: int) -> tuple[torch.Tensor, float]:
    return 1.0 / (rope["rope_theta"] ** _exponents(dim)), 1.0


def _linear(dim: int, rope: Mapping[str, Any], max_position: int) -> tuple[torch.Tensor, float]:
    return _default(dim, rope, max_position)[0] / rope["factor"], 1.0


def _llama3(dim: int, rope: Mapping[str, Any], max_position: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long waves are slowed by ``factor``, short ones kept, those between interpolated."""
    inv_freq, _ = _default(dim, rope, max_position)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # in the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / rope["factor"]), 1.0


def _yarn(dim: int, rope: Mapping[str, Any], max_position: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over the channels between kept and interpolated frequencies."""
    base, original = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope["factor"] or max_position / original

    def channel_of(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    low = channel_of(rope.get("beta_fast") or 32)
    high = channel_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    inv_freq, _ = _default(dim, rope, max_position)
    channels = torch.arange(dim // 2, dtype=torch.float32, device=inv_freq.device)
    slowed = ((channels - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    inv_freq = inv_freq * (1.0 - slowed) + inv_freq / factor * slowed

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return inv_freq, float(attention_factor)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


_SCALINGS = {"default": _default, "linear": _linear, "dynamic": _default, "llama3": _llama3, "yarn": _yarn}
