"""Root-mean-square norms; statistics, weight and product in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from atom.errors import ModelLoadError
from atom.kernels.linear import Activations
from atom.kernels.registry import select_kernel
from atom.model_ops.weights import copy_into, new_parameter
from atom.utils import envs

if TYPE_CHECKING:
    from atom.model_ops.linear import LinearBase


class RMSNorm(nn.Module):
    """``w * x / sqrt(mean(x^2) + eps)`` over the last dimension of ``size``.

    ``weight`` holds the effective factor in fp32, whatever the checkpoint stores.
    """

    offset = 0.0  # added to the checkpoint's weight

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size, loader=self.load_weight, dtype=torch.float32)
        self._norm = select_kernel("rms_norm", size=size)

    def quantise_for(self, linear: LinearBase) -> None:
        """Round the results to what ``linear``, their only reader, takes, in the pass that makes them.

        Nothing changes where ``linear`` takes them as they are, or without
        ``ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_RMSNORM_QUANT``.
        """
        if linear.kernel.takes_quantised and envs.ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_RMSNORM_QUANT:
            self._norm = select_kernel("rms_norm_fp8", size=self.weight.shape[-1])

    def load_weight(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: object = None) -> None:
        copy_into(param.data, tensor.float() + self.offset)

    def forward(self, x: torch.Tensor) -> Activations:
        return self._norm(x, self.weight, self.eps)


class GemmaRMSNorm(RMSNorm):
    """Gemma's form: the checkpoint stores the factor's distance from one."""

    offset = 1.0


class QKNorm(RMSNorm):
    """Query and key heads, each normalised over ``head_dim``, in one pass.

    ``weight [num_heads + num_kv_heads, head_dim]`` repeats the checkpoint's two vectors for each head.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float = 1e-6):
        super().__init__(head_dim, eps)
        self.num_heads = num_heads
        heads = num_heads + num_kv_heads
        self.weight = new_parameter(
            heads, head_dim, loader=self.load_weight, shards=("q", "k"), dtype=torch.float32
        )

    def load_weight(self, param: nn.Parameter, tensor: torch.Tensor, shard_id: object = None) -> None:
        rows = slice(0, self.num_heads) if shard_id == "q" else slice(self.num_heads, None)
        if tensor.shape != param.shape[1:]:
            raise ModelLoadError(f"expected shape {list(param.shape[1:])}, found {list(tensor.shape)}")
        param.data[rows] = tensor.float() + self.offset


class GemmaQKNorm(QKNorm):
    offset = 1.0
