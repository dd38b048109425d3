"""How a checkpoint tensor gets into a parameter: each parameter carries its own loader.

``param.weight_loader(param, tensor, shard_id=None)`` copies ``tensor`` (full size, as the checkpoint has it)
into this rank's part of ``param``. ``param.expected_shards`` lists every shard id that must arrive; ``(None,)``
for a parameter that one checkpoint tensor fills.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from atom.distributed.parallel_state import get_tp_group
from atom.errors import ModelLoadError
from atom.quantization.block_weight import BlockWeight
from atom.utils.debug_helper import maybe_dump_weights_and_exit

WeightLoader = Callable[..., None]


def new_parameter(
    *shape: int, loader: WeightLoader, shards: tuple = (None,), dtype: torch.dtype | None = None
) -> nn.Parameter:
    """An uninitialised parameter in the current default dtype and device, with its loader attached."""
    param = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    param.weight_loader = loader
    param.expected_shards = shards
    return param


def load_whole(param: nn.Parameter, tensor: torch.Tensor, shard_id: object = None) -> None:
    """Loader of a parameter that every rank holds in full."""
    copy_into(param.data, tensor)


def copy_into(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy with dtype conversion. Raises ModelLoadError when the shapes differ."""
    if target.shape != tensor.shape:
        raise ModelLoadError(f"expected shape {list(target.shape)}, found {list(tensor.shape)}")
    target.copy_(tensor)


def announced_blocks(param: nn.Parameter) -> BlockWeight | None:
    """The GGUF blocks that stand in for ``param``; None where it is loaded itself."""
    blocks = getattr(param, "block_weight", None)
    return blocks if blocks is not None and blocks.is_announced else None


def num_loaded_bytes(param: nn.Parameter) -> int:
    """Bytes of a parameter, or of the blocks that stand in for it."""
    blocks = announced_blocks(param)
    return param.nbytes if blocks is None else blocks.num_bytes


def free_parameter(param: nn.Parameter) -> None:
    """Give the memory back now, whoever still refers to the parameter (the loader does until it returns)."""
    param.data = param.data.new_empty(0)


def slice_of(tensor: torch.Tensor, dim: int, index: int, size: int, num_slices: int) -> torch.Tensor:
    """Slice ``index`` of ``num_slices`` equal ones along ``dim``, each ``size`` long.

    Raises ModelLoadError when the tensor is not ``num_slices * size`` long there.
    """
    if dim >= tensor.dim() or tensor.shape[dim] != num_slices * size:
        raise ModelLoadError(
            f"expected {num_slices * size} entries in dimension {dim}, found shape {list(tensor.shape)}"
        )
    return tensor.narrow(dim, index * size, size)


def finish_loading(model: nn.Module) -> None:
    """All weights are there: dump them if the environment asks for it, then the model's ``after_load``."""
    maybe_dump_weights_and_exit(model, get_tp_group().rank)
    after_load = getattr(model, "after_load", None)
    if after_load is not None:
        after_load()


def run_after_load(root: nn.Module) -> None:
    """Call ``after_load()`` of every submodule that has one: packing, quantising, tying."""
    for module in root.modules():
        hook = getattr(module, "after_load", None)
        if module is not root and hook is not None:
            hook()
