"""Token embedding and LM head, split over the ranks by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atom.distributed.parallel_state import get_tp_group
from atom.errors import ConfigError, ModelLoadError
from atom.kernels.linear import LinearKernel
from atom.kernels.registry import select_kernel
from atom.model_ops.weights import announced_blocks, free_parameter, new_parameter
from atom.quantization.block_weight import BlockWeight
from atom.quantization.spec import current_spec

LM_HEAD_DTYPES = ("auto", "int8")


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary, padded to a multiple of the group's size; a rank holds consecutive ones.

    Where a kernel reads rows from the layout of products, the table is kept in that alone: a head that shares it
    packs it for both.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.tp = get_tp_group()
        self.num_embeddings = num_embeddings
        self.num_rows = -(-num_embeddings // self.tp.world_size)
        self.first_row = self.tp.rank * self.num_rows
        self.weight = new_parameter(self.num_rows, embedding_dim, loader=self.load_rows)
        self.kernel = select_kernel(
            current_spec().op, dtype=self.weight.dtype, in_features=embedding_dim, out_features=self.num_rows
        )
        if self.kernel.takes_gguf_blocks and self.tp.world_size == 1:
            self.weight.block_weight = BlockWeight({None: self.num_rows}, embedding_dim)
        self.packed: Any = None
        self.dtype = self.weight.dtype
        self.is_shared = False  # a head packs this table

    def load_rows(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        expected = [self.num_embeddings, *param.shape[1:]]
        if list(tensor.shape) != expected:
            raise ModelLoadError(f"expected shape {expected}, found {list(tensor.shape)}")
        mine = tensor[self.first_row : self.first_row + self.num_rows]
        param.data[: len(mine)].copy_(mine)
        param.data[len(mine) :].zero_()

    def after_load(self) -> None:
        if self.weight is not None and self.kernel.can_gather and not self.is_shared:
            blocks = announced_blocks(self.weight)
            packed = self.kernel.pack(self.weight.data) if blocks is None else blocks.take()
            self.replace(packed, self.kernel)

    def replace(self, packed: Any, kernel: LinearKernel) -> None:
        """Read rows from ``packed`` of ``kernel`` from now on; frees the weight."""
        self.packed, self.kernel = packed, kernel
        free_parameter(self.weight)
        self.weight = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [num_tokens]`` -> ``[num_tokens, embedding_dim]``."""
        if self.tp.world_size == 1:
            return self._rows(input_ids)
        local = input_ids - self.first_row
        is_mine = (local >= 0) & (local < self.num_rows)
        return self.tp.all_reduce(self._rows(local * is_mine) * is_mine.unsqueeze(-1))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.kernel.gather(ids, self.packed).to(self.dtype)
        return F.embedding(ids, self.weight)


class ParallelLMHead(nn.Module):
    """Projection of hidden states to logits over the vocabulary.

    Args:
        tied_to: the embedding whose weight it shares; None for a weight of its own.
        dtype: ``auto`` computes as the layers do; ``int8`` in int8 with one scale a row. A tied embedding is
            read from what the head packed, where the kernel can.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tied_to: VocabParallelEmbedding | None = None,
        bias: bool = False,
        dtype: str = "auto",
    ):
        super().__init__()
        if dtype not in LM_HEAD_DTYPES:
            raise ConfigError(f"lm_head_dtype: {dtype!r} is not one of {', '.join(LM_HEAD_DTYPES)}")
        self.tp = get_tp_group()
        self.num_embeddings = num_embeddings
        self.table = VocabParallelEmbedding(num_embeddings, embedding_dim) if tied_to is None else None
        # Not a submodule: a tied weight is listed, loaded and counted once, with the embedding.
        self._source = [tied_to or self.table]
        self._source[0].is_shared = True
        rows = self._source[0].num_rows
        self.bias = new_parameter(rows, loader=self._load_bias) if bias else None
        traits = {"in_features": embedding_dim, "out_features": rows}
        op = "int8_linear" if dtype == "int8" else current_spec().op
        self.kernel = select_kernel(op, dtype=self._source[0].weight.dtype, **traits)
        if not self.kernel.takes_gguf_blocks:
            self._source[0].weight.block_weight = None
        self.packed: Any = None

    def _load_bias(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        if list(tensor.shape) != [self.num_embeddings]:
            raise ModelLoadError(f"expected shape {[self.num_embeddings]}, found {list(tensor.shape)}")
        first = self._source[0].first_row
        mine = tensor[first : first + len(param)]
        param.data[: len(mine)].copy_(mine)
        param.data[len(mine) :].zero_()

    def after_load(self) -> None:
        """Pack or quantise the weight; the original is freed when a copy was made and nothing else needs it."""
        source = self._source[0]
        if source.weight is None:
            return
        blocks = announced_blocks(source.weight)
        weight = source.weight.data
        if self.table is None and not self._replaces_source and self.kernel.makes_copy:
            weight = (
                weight.clone()
            )  # packing may work where the weight lies, and the embedding still reads it
        self.packed = self.kernel.pack(weight) if blocks is None else blocks.take()
        if self._replaces_source:
            source.replace(self.packed, self.kernel)
        elif self.table is not None and self.kernel.makes_copy:
            free_parameter(source.weight)
            source.weight = None

    @property
    def _replaces_source(self) -> bool:
        """Whether the embedding is read from this layer's packed weight: one copy in memory."""
        return self.kernel.can_gather and self._source[0].kernel.can_gather

    def num_extra_bytes(self) -> int:
        """What this layer takes, once loaded, beyond the parameters that it lists."""
        weight = self._source[0].weight
        if weight is None or not self.kernel.makes_copy:  # None: packed already, and listed no more
            return 0
        if announced_blocks(weight) is not None:
            return 0
        packed = self.kernel.num_bytes(*weight.shape, weight.dtype)
        is_freed = self.table is not None or self._replaces_source
        return packed - weight.nbytes if is_freed else packed

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``hidden_states [num_rows, hidden_size]`` -> logits ``[num_rows, vocab_size]`` on every rank.

        In the dtype of the hidden states; fp32 from an int8 head.
        """
        logits = self.kernel(hidden_states, self.packed, self.bias)
        return self.tp.all_gather(logits)[..., : self.num_embeddings]
