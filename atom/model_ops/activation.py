"""The gated activation of an MLP, by the name that a model configuration gives it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom.errors import ConfigError
from atom.kernels.registry import select_kernel

_OPS = {
    "silu": "silu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
}


def get_act_and_mul(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """``act(gate) * up`` over rows ``[gate | up]``. Raises ConfigError for an activation we do not have."""
    if name not in _OPS:
        raise ConfigError(f"hidden_act: {name!r} is not supported; supported: {', '.join(_OPS)}")
    return select_kernel(_OPS[name])
