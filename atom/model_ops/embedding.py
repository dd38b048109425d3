"""Token embedding and LM head, split over the ranks by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atom.distributed.parallel_state import get_tp_group
from atom.errors import ConfigError, ModelLoadError
from atom.kernels.reference.linear import quantize_rows_int8
from atom.kernels.registry import select_kernel
from atom.model_ops.weights import free_parameter, new_parameter

LM_HEAD_DTYPES = ("auto", "int8")


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary, padded to a multiple of the group's size; a rank holds consecutive ones."""

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.tp = get_tp_group()
        self.num_embeddings = num_embeddings
        self.num_rows = -(-num_embeddings // self.tp.world_size)
        self.first_row = self.tp.rank * self.num_rows
        self.weight = new_parameter(self.num_rows, embedding_dim, loader=self.load_rows)

    def load_rows(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        expected = [self.num_embeddings, *param.shape[1:]]
        if list(tensor.shape) != expected:
            raise ModelLoadError(f"expected shape {expected}, found {list(tensor.shape)}")
        mine = tensor[self.first_row : self.first_row + self.num_rows]
        param.data[: len(mine)].copy_(mine)
        param.data[len(mine) :].zero_()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [num_tokens]`` -> ``[num_tokens, embedding_dim]``."""
        if self.tp.world_size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.first_row
        is_mine = (local >= 0) & (local < self.num_rows)
        rows = F.embedding(local * is_mine, self.weight) * is_mine.unsqueeze(-1)
        return self.tp.all_reduce(rows)


class ParallelLMHead(nn.Module):
    """Projection of hidden states to logits over the vocabulary.

    Args:
        tied_to: the embedding whose weight it shares; None for a weight of its own.
        dtype: ``auto`` computes in the weight's dtype; ``int8`` in int8 with one scale a row (the embedding
            table stays as it is).
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
        rows = self._source[0].num_rows
        self.bias = new_parameter(rows, loader=self._load_bias) if bias else None
        traits = {"in_features": embedding_dim, "out_features": rows}
        self.is_int8 = dtype == "int8"
        op = "int8_linear" if self.is_int8 else "linear"
        self.kernel = select_kernel(op, dtype=self._source[0].weight.dtype, **traits)
        self.packed: Any = None

    def _load_bias(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        if list(tensor.shape) != [self.num_embeddings]:
            raise ModelLoadError(f"expected shape {[self.num_embeddings]}, found {list(tensor.shape)}")
        first = self._source[0].first_row
        mine = tensor[first : first + len(param)]
        param.data[: len(mine)].copy_(mine)
        param.data[len(mine) :].zero_()

    def after_load(self) -> None:
        """Pack or quantise the weight; an untied one is freed when a copy was made."""
        if self._source[0].weight is None:
            return
        weight = self._source[0].weight.data
        self.packed = quantize_rows_int8(weight) if self.is_int8 else self.kernel.pack(weight)
        if self.table is not None and self._makes_copy:
            free_parameter(self.table.weight)
            self.table.weight = None

    @property
    def _makes_copy(self) -> bool:
        return self.is_int8 or self.kernel.makes_copy

    def num_extra_bytes(self) -> int:
        """What this layer takes, once loaded, beyond the parameters that it lists."""
        weight = self._source[0].weight
        if weight is None or not self._makes_copy:  # None: packed already, and listed no more
            return 0
        packed = weight.numel() + 4 * len(weight) if self.is_int8 else weight.nbytes
        return packed if self.table is None else packed - weight.nbytes

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``hidden_states [num_rows, hidden_size]`` -> logits ``[num_rows, vocab_size]`` on every rank.

        In the dtype of the hidden states; fp32 from an int8 head.
        """
        if self.is_int8:
            logits = self.kernel(hidden_states, *self.packed)
            if self.bias is not None:
                logits += self.bias
        else:
            logits = self.kernel(hidden_states, self.packed, self.bias)
        return self.tp.all_gather(logits)[..., : self.num_embeddings]
