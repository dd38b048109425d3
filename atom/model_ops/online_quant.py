"""Round a model's linear layers while it loads, as ``--online-quant-config`` says."""

from __future__ import annotations

import torch
from torch import nn

from atom.config_parts import OnlineQuantConfig
from atom.kernels.reference.fp8 import Fp8Linear
from atom.model_ops.linear import LinearBase
from atom.quantization.online import OnlineFormats
from atom.utils.logging import init_logger

logger = init_logger(__name__)


def apply_online_quant(model: nn.Module, config: OnlineQuantConfig | None) -> dict[str, str]:
    """Give each linear layer its format, before weights are loaded; what feeds it then rounds what it makes.

    Call it where the model was built, inside its device and default dtype.

    Args:
        model: with ``packed_modules``, see ``CausalLM``.
        config: None: nothing is rounded.

    Returns:
        The format's name by the name of each layer that is rounded.

    Raises:
        ConfigError: no kernel of this device multiplies weights of a format.
    """
    if config is None:
        return {}
    formats = OnlineFormats(config, model.packed_modules)
    chosen: dict[str, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase) and (spec := formats.format_of(name)) is not None:
            layer.use_format(spec)
            chosen[name] = spec.name
    for module in model.modules():
        fuse = getattr(module, "fuse_quantisation", None)
        if fuse is not None:
            fuse()
    if torch.get_default_device().type != "meta":  # of a model that plans are made with, nobody needs to know
        _report(model, formats, chosen)
    return chosen


def _report(model: nn.Module, formats: OnlineFormats, chosen: dict[str, str]) -> None:
    modules = dict(model.named_modules())
    for rule in formats.rules_without(modules):
        logger.warning("online_quant_config: %r is the name of no layer", rule)
    num_layers = sum(isinstance(module, LinearBase) for module in modules.values())
    logger.info("online quantisation: %d of %d linear layers are rounded", len(chosen), num_layers)
    if any(type(modules[name].kernel) is Fp8Linear for name in chosen):
        logger.warning("this device has no fast fp8 products: they are computed in fp32, slowly")
