"""The gated activation of an MLP, by the name that a model configuration gives it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom.errors import ConfigError
from atom.kernels.linear import Activations
from atom.kernels.registry import select_kernel

_OPS = {
    "silu": "silu_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
}


def get_act_and_mul(name: str, *, quantised_size: int | None = None) -> Callable[[torch.Tensor], Activations]:
    """``act(gate) * up`` over rows ``[gate | up]``.

    Args:
        quantised_size: rows of so many results come rounded to fp8; None: they are not rounded.

    Raises:
        ConfigError: an activation that we do not have.
    """
    if name not in _OPS:
        raise ConfigError(f"hidden_act: {name!r} is not supported; supported: {', '.join(_OPS)}")
    if quantised_size is not None:
        return select_kernel(f"{_OPS[name]}_fp8", size=quantised_size)
    return select_kernel(_OPS[name])
