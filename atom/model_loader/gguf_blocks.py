"""Blocks of a GGUF file straight into packed weights, for the parameters that can do without wide values.

A model's parameter carries a ``block_weight`` where its kernel reads blocks (``atom/quantization/block_weight.py``).
``announce_blocks`` tells it the types, before memory is planned; ``load_blocks`` fills it.
"""

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import nn

from atom.model_loader.checkpoint import DTYPE_SIZES, TensorInfo
from atom.model_loader.gguf_dequant import QuantisedRows, block_elements
from atom.model_loader.model_files import ModelFiles
from atom.model_loader.weight_file import WeightFile
from atom.quantization.block_weight import ROWS_AT_ONCE, BlockWeight
from atom.quantization.quantizers import to_q8_0
from atom.utils.logging import init_logger

logger = init_logger(__name__)


def announce_blocks(model: nn.Module, files: ModelFiles) -> int:
    """Let every parameter that can keep its tensors' blocks do so; how many there are."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    types: dict[str, dict[Any, str]] = defaultdict(dict)
    for info in files.tensors.values():
        name = model.gguf_tensor_name(info.name)
        place = model.map_checkpoint_name(name) if name is not None else None
        if place is not None:
            types[place[0]][place[1]] = info.dtype
    elements = {
        name: block_elements(name)
        for name in {name for shards in types.values() for name in shards.values()}
        if name not in DTYPE_SIZES
    }
    kept: Counter[str] = Counter()
    rounded: Counter[str] = Counter()
    num_kept = 0
    for name, shards in types.items():
        blocks: BlockWeight | None = getattr(parameters.get(name), "block_weight", None)
        if blocks is None or not blocks.announce(shards, elements):
            continue
        num_kept += 1
        for shard, kind in shards.items():
            stored = blocks.stored_type(shard)
            kept[stored] += 1
            if stored != kind:
                rounded[f"{kind} to {stored}"] += 1
    if num_kept:
        logger.info("GGUF blocks kept packed: %s", _listing(kept))
    if rounded:
        logger.info("GGUF blocks of types without a product, rounded once more: %s", _listing(rounded))
    return num_kept


def load_blocks(
    blocks: BlockWeight, file: WeightFile, info: TensorInfo, shard: Any, order: torch.Tensor | None
) -> None:
    """All rows of one tensor into ``blocks``, in ``order`` where it is given.

    Raises:
        ValueError: the tensor has another shape than the shard.
    """
    expected = (blocks.shards[shard], blocks.k)
    if info.shape != expected:
        raise ValueError(f"expected shape {list(expected)}, found {list(info.shape)}")
    source = QuantisedRows(file, info)
    is_same = blocks.stored_type(shard) == info.dtype
    for start in range(0, info.shape[0], ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, info.shape[0])
        if order is None:
            rows = source.read_blocks(start, stop)
        else:
            rows = source.read_blocks(0, info.shape[0])[order[start:stop]]
        if not is_same:
            rows = to_q8_0(source.widen(rows))
        blocks.put(shard, start, rows)
        if order is None:
            source.release(start, stop)


def _listing(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
