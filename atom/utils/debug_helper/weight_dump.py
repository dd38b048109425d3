"""The weights of chosen layers as they were loaded (``ATOM_WEIGHT_DUMP_DIR``)."""

import sys

import torch
from torch import nn

from atom.errors import AtomError
from atom.utils import envs
from atom.utils.debug_helper.files import DumpName, make_folder, save
from atom.utils.debug_helper.layers import check_layers, layer_of_name
from atom.utils.logging import init_logger

logger = init_logger(__name__)


def maybe_dump_weights_and_exit(model: nn.Module, rank: int = 0) -> None:
    """Save this rank's parameters and buffers of the layers asked for, by name, one file a layer.

    Call it before ``after_load``, which packs weights. Those of routed experts (``*.experts.*``) are left out, most
    of which are packed in the checkpoint already.

    Raises:
        SystemExit: with 0, once all ranks have written, unless ``ATOM_WEIGHT_DUMP_EXIT`` is off.
        ConfigError: the model has no such layer, or the folder cannot be written.
        AtomError: a file cannot be written.
    """
    if not envs.ATOM_WEIGHT_DUMP_DIR:
        return
    folder = make_folder(envs.ATOM_WEIGHT_DUMP_DIR, "ATOM_WEIGHT_DUMP_DIR")
    by_layer: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        layer = layer_of_name(name)
        if layer is not None and ".experts." not in name:
            by_layer.setdefault(layer, {})[name] = tensor
    layers = envs.ATOM_WEIGHT_DUMP_LAYERS
    check_layers("ATOM_WEIGHT_DUMP_LAYERS", layers, by_layer)
    for layer in layers:
        path = folder / DumpName(layer, "", rank).file_name
        try:
            save(path, {name: tensor.detach().cpu().clone() for name, tensor in by_layer[layer].items()})
        except OSError as error:
            raise AtomError(f"the weights of layer {layer} cannot be dumped: {error}") from error
        logger.info("weights of layer %d: %d tensors in %s", layer, len(by_layer[layer]), path)
    if envs.ATOM_WEIGHT_DUMP_EXIT:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # the first rank to end would take the others with it
        logger.warning("the process ends after its weight dump (ATOM_WEIGHT_DUMP_EXIT=0 lets it go on)")
        sys.exit(0)
