"""Weights for measurements without a checkpoint: memory of the right shape, zeros, or seeded noise."""

from math import sqrt

import torch
from torch import nn

from atom.errors import ConfigError
from atom.model_ops.weights import finish_loading

DUMMY_MODES = ("empty", "zero", "xavier")
_SEED = 0
_TILE = 1 << 22  # elements drawn; larger parameters repeat them, so that 1e9 take a second and not a minute


@torch.no_grad()
def load_dummy(model: nn.Module, mode: str) -> None:
    """Fill the parameters of ``model`` and run its ``after_load``.

    Args:
        mode: ``empty`` leaves the memory as it came (only sizes and speed are of interest), ``zero`` clears
            it, ``xavier`` draws matrices uniformly within the Xavier bound of their last two dimensions and
            sets vectors named ``weight`` (norms) to 1, other vectors (biases) to 0. Seeded: two loads agree.

    Raises:
        ConfigError: unknown mode.
    """
    if mode not in DUMMY_MODES:
        raise ConfigError(f"load_dummy must be one of {', '.join(DUMMY_MODES)}, got {mode!r}")
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if mode == "zero":
            parameter.zero_()
        elif mode == "xavier":
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(_SEED)
            _fill_xavier(name, parameter.data, generators[device])
    finish_loading(model)


def _fill_xavier(name: str, data: torch.Tensor, generator: torch.Generator) -> None:
    if not data.is_floating_point():
        data.zero_()
    elif data.dim() < 2:
        data.fill_(1.0 if name.endswith("weight") else 0.0)
    else:
        bound = sqrt(6.0 / (data.shape[-2] + data.shape[-1]))
        flat = data.view(-1)
        tile = flat[:_TILE].uniform_(-bound, bound, generator=generator)
        for start in range(_TILE, flat.numel(), _TILE):
            rest = flat[start : start + _TILE]
            rest.copy_(tile[: rest.numel()])
