"""A parameter's stand-in for GGUF checkpoints: the file's blocks are kept instead of being widened.

The loader announces the types of all tensors that fill the parameter, then hands over their blocks in runs of rows;
the layer takes the packed result in ``after_load``. Types that the products do not read become Q8_0, which rounds
once more, to 8 bits with a scale for every 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from atom.kernels.cpu.native.gguf import BLOCK_TYPES, BlockPanels, PackedBlocks, join_blocks
from atom.kernels.cpu.native.weights import PANEL

_FALLBACK = "Q8_0"
ROWS_AT_ONCE = 16 * PANEL  # handed over in a run


class BlockWeight:
    """Blocks of a weight ``[n, k]``.

    Args:
        shards: rows of each tensor that fills the weight, in the order of the rows.
        activation: of a gated weight, whose two shards become one product with it: ``silu`` or ``gelu_tanh``.
    """

    def __init__(self, shards: Mapping[Any, int], k: int, activation: str | None = None):
        self.shards = dict(shards)
        self.k = k
        self._epilogue = "store" if activation is None else f"{activation}_mul"
        self._types: dict[Any, str] = {}
        self._panels: dict[Any, BlockPanels] = {}

    @property
    def is_gated(self) -> bool:
        return self._epilogue != "store"

    def announce(self, types: Mapping[Any, str], block_elements: Mapping[str, int]) -> bool:
        """Whether tensors of these block types, one a shard, are kept; the widened way is taken otherwise.

        Args:
            types: GGUF type (or torch dtype) by shard.
            block_elements: of each GGUF type; what is not in it is no block type.
        """
        if set(types) != set(self.shards) or not all(name in block_elements for name in types.values()):
            return False
        stored = {shard: name if name in BLOCK_TYPES else _FALLBACK for shard, name in types.items()}
        if self.is_gated and len(set(stored.values())) > 1:  # alternating panels are of one type
            stored = dict.fromkeys(stored, _FALLBACK)
        if any(self.k % BLOCK_TYPES[name].block_elements for name in stored.values()):
            return False
        self._types = stored
        return True

    @property
    def is_announced(self) -> bool:
        return bool(self._types)

    def stored_type(self, shard: Any) -> str:
        """The type of a shard's blocks as they are to arrive in :meth:`put`."""
        return self._types[shard]

    @property
    def num_bytes(self) -> int:
        """What the packed weight takes."""
        return sum(BLOCK_TYPES[self._types[s]].packed_bytes(rows, self.k) for s, rows in self.shards.items())

    def put(self, shard: Any, first_row: int, blocks: torch.Tensor) -> None:
        """Rows of a shard from ``first_row``, a multiple of 64, as blocks ``[num_rows, row bytes]``."""
        if self.is_gated:
            key, base = None, list(self.shards).index(shard) * self.shards[shard]
        else:
            key, base = shard, 0
        if key not in self._panels:
            rows = sum(self.shards.values()) if self.is_gated else self.shards[shard]
            self._panels[key] = BlockPanels(BLOCK_TYPES[self._types[shard]], rows, self.k, self._epilogue)
        self._panels[key].put(base + first_row, blocks)

    def take(self) -> PackedBlocks:
        """The packed weight; what was gathered is forgotten."""
        order = [None] if self.is_gated else list(self.shards)
        packed = [self._panels[key].packed() for key in order]
        self._panels = {}
        return join_blocks(packed)
