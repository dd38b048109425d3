"""Linear layers, sharded over the tensor-parallel group by their weight loaders.

Column-parallel layers split the output features, row-parallel ones the input features and add up the partial
results. A layer is used after ``after_load()``, which packs its weight for the chosen kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import atom.quantization.kernels  # noqa: F401  (registers its kernels)
from atom.distributed.parallel_state import get_tp_group, shard_size
from atom.kernels.linear import Activations, add_up
from atom.kernels.registry import select_kernel
from atom.model_ops.weights import (
    announced_blocks,
    copy_into,
    free_parameter,
    load_whole,
    new_parameter,
    slice_of,
)
from atom.quantization.block_weight import BlockWeight
from atom.quantization.spec import QuantSpec, current_spec


class LinearBase(nn.Module):
    """``y = x W^T + b`` over this rank's ``weight [out_features, in_features]``.

    Subclasses decide which part of the checkpoint's tensor is this rank's, in ``load_weight`` and
    ``load_bias``. ``has_outliers`` tells quantisation that a few inputs are much larger than the others.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        shards: tuple = (None,),
        has_outliers: bool = False,
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = new_parameter(out_features, in_features, loader=self.load_weight, shards=shards)
        self.bias = new_parameter(out_features, loader=self.load_bias, shards=shards) if bias else None
        self.has_outliers = has_outliers
        self.packed: Any = None
        self.use_format(current_spec())
        if self.kernel.takes_gguf_blocks:
            self.weight.block_weight = self._new_block_weight()

    def use_format(self, spec: QuantSpec) -> None:
        """What the weight will be packed as. Raises ConfigError where no kernel multiplies such a weight."""
        self.kernel = select_kernel(spec.outlier_op if self.has_outliers else spec.op, **self._traits())

    def num_saved_bytes(self) -> int:
        """By how many bytes the packed weight will be smaller than the parameter that is loaded."""
        if not self.kernel.makes_copy or announced_blocks(self.weight) is not None:
            return 0
        shape = self.out_features, self.in_features
        return self.weight.nbytes - self.kernel.num_bytes(*shape, self.weight.dtype)

    def _traits(self) -> dict[str, Any]:
        """Facts by which the kernel is chosen."""
        return {
            "dtype": self.weight.dtype,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "has_bias": self.bias is not None,
        }

    def load_weight(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        load_whole(param, tensor, shard_id)

    def load_bias(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        load_whole(param, tensor, shard_id)

    def after_load(self) -> None:
        """Pack the weight; the unpacked one is freed unless the kernel uses it as it is."""
        if self.weight is None:
            return
        blocks = announced_blocks(self.weight)
        self.packed = self._pack(self.weight.data) if blocks is None else self._take(blocks)
        if self.kernel.makes_copy:
            free_parameter(self.weight)
            self.weight = None

    def _pack(self, weight: torch.Tensor) -> Any:
        return self.kernel.pack(weight)

    def _new_block_weight(self) -> BlockWeight:
        """Where the blocks of a GGUF file go; one tensor fills the weight unless a subclass says otherwise."""
        return BlockWeight({None: self.out_features}, self.in_features)

    def _take(self, blocks: BlockWeight) -> Any:
        return blocks.take()

    def forward(self, x: Activations) -> torch.Tensor:
        """``x [num_tokens, in_features]`` -> ``[num_tokens, out_features]``."""
        return self.kernel(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"


class ReplicatedLinear(LinearBase):
    """The same weight on every rank."""


class ColumnParallelLinear(LinearBase):
    """Output features split over the ranks; the output stays split.

    Args:
        out_features: of the whole layer; must divide by the group's size.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False):
        self.tp = get_tp_group()
        size = shard_size(out_features, self.tp.world_size, "out_features")
        super().__init__(in_features, size, bias)

    def load_weight(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        copy_into(param.data, slice_of(tensor, 0, self.tp.rank, self.out_features, self.tp.world_size))

    load_bias = load_weight


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers over the same input in one product, e.g. ``[gate | up]``.

    Shard ``i`` of a checkpoint fills the i-th of ``out_sizes``; each is split over the ranks on its own, so
    a rank's output is ``[its part of 0 | its part of 1 | ...]``.
    """

    def __init__(self, in_features: int, out_sizes: tuple[int, ...], *, bias: bool = False):
        self.tp = get_tp_group()
        self.sizes = [shard_size(size, self.tp.world_size, "out_features") for size in out_sizes]
        super().__init__(in_features, sum(self.sizes), bias, shards=tuple(range(len(out_sizes))))

    def load_weight(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        size = self.sizes[shard_id]
        target = param.data.narrow(0, sum(self.sizes[:shard_id]), size)
        copy_into(target, slice_of(tensor, 0, self.tp.rank, size, self.tp.world_size))

    load_bias = load_weight

    def _new_block_weight(self) -> BlockWeight:
        return BlockWeight(dict(enumerate(self.sizes)), self.in_features)


class GateUpParallelLinear(MergedColumnParallelLinear):
    """``[gate | up]`` of a gated MLP, or ``activation(gate) * up`` where the kernel computes that at once.

    Which of the two is said by ``is_activated``, once the weight is packed.
    """

    def __init__(self, in_features: int, intermediate_size: int, activation: str, *, bias: bool = False):
        self.activation = activation
        super().__init__(in_features, (intermediate_size, intermediate_size), bias=bias)
        self.is_activated = False

    def _traits(self) -> dict[str, Any]:
        return super()._traits() | {"gated_by": self.activation}

    def _new_block_weight(self) -> BlockWeight:
        return BlockWeight(dict(enumerate(self.sizes)), self.in_features, self.activation)

    def _take(self, blocks: BlockWeight) -> Any:
        self.is_activated = True
        return blocks.take()

    def _pack(self, weight: torch.Tensor) -> Any:
        packed = self.kernel.pack_gated(weight, self.activation)
        self.is_activated = packed is not None
        return packed if self.is_activated else super()._pack(weight)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections in one product; a rank's output is ``[q | k | v]`` of its heads.

    Query heads are split over the ranks. Key/value heads are split too, or, where there are fewer of them
    than ranks, each is held by the ranks whose query heads use it.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, *, bias: bool = False
    ):
        self.tp = get_tp_group()
        self.num_heads = shard_size(num_heads, self.tp.world_size, "num_attention_heads")
        if num_kv_heads >= self.tp.world_size:
            self.num_kv_heads = shard_size(num_kv_heads, self.tp.world_size, "num_key_value_heads")
            self.num_kv_replicas = 1
        else:
            self.num_kv_heads = 1
            self.num_kv_replicas = self.tp.world_size // num_kv_heads
            shard_size(self.tp.world_size, num_kv_heads, "the ranks over num_key_value_heads: ranks")
        self.head_dim = head_dim
        self.q_size = self.num_heads * head_dim
        self.kv_size = self.num_kv_heads * head_dim
        super().__init__(hidden_size, self.q_size + 2 * self.kv_size, bias, shards=("q", "k", "v"))

    def _new_block_weight(self) -> BlockWeight:
        return BlockWeight({"q": self.q_size, "k": self.kv_size, "v": self.kv_size}, self.in_features)

    def load_weight(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        if shard_id == "q":
            target = param.data.narrow(0, 0, self.q_size)
            copy_into(target, slice_of(tensor, 0, self.tp.rank, self.q_size, self.tp.world_size))
            return
        start = self.q_size if shard_id == "k" else self.q_size + self.kv_size
        target = param.data.narrow(0, start, self.kv_size)
        index, count = (n // self.num_kv_replicas for n in (self.tp.rank, self.tp.world_size))
        copy_into(target, slice_of(tensor, 0, index, self.kv_size, count))

    load_bias = load_weight


class RowParallelLinear(LinearBase):
    """Input features split over the ranks; partial outputs are summed over them.

    The bias is added once, after the sum.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, has_outliers: bool = False
    ):
        self.tp = get_tp_group()
        size = shard_size(in_features, self.tp.world_size, "in_features")
        super().__init__(size, out_features, bias, has_outliers=has_outliers)

    def load_weight(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: Any = None) -> None:
        copy_into(param.data, slice_of(tensor, 1, self.tp.rank, self.in_features, self.tp.world_size))

    def forward(self, x: Activations, total: torch.Tensor | None = None) -> torch.Tensor:
        """``x [num_tokens, in_features of this rank]`` -> the whole ``[num_tokens, out_features]``.

        With ``total``, alike: that plus the layer's output. The sum may take its memory.
        """
        if self.tp.world_size == 1:
            if total is None:
                return self.kernel(x, self.packed, self.bias)
            return self.kernel.add_to(total, x, self.packed, self.bias)
        y = self.tp.all_reduce(self.kernel(x, self.packed, None))
        y = y if self.bias is None else y + self.bias
        return y if total is None else add_up(total, y)
