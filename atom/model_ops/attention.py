"""The attention layer of a model: it finds its metadata and cache, its backend does the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atom.config import get_current_atom_config
from atom.kernels.reference.linear import ReferenceLinear
from atom.model_ops.attentions.backend import AttentionSpec, select_backend
from atom.utils.custom_register import mark_spliting_op
from atom.utils.forward_context import get_forward_context
from atom.utils.region_graph import break_recording

if TYPE_CHECKING:
    from atom.config_parts import KVCacheTensor
    from atom.model_ops.linear import LinearBase
    from atom.utils.forward_context import AttentionMetaData


class Attention(nn.Module):
    """Causal attention over the paged cache of one layer.

    Args:
        num_heads: query heads of this rank; ``num_kv_heads`` alike, and must divide it.
        layer_name: unique in the model; the key of its cache group and cache in the forward context, and by which ops
            find the layer. Taken under ``set_current_atom_config``: ValueError.
        sliding_window: a query sees itself and the ``sliding_window - 1`` positions before it.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``.
        sinks: ``[num_heads]`` logits that join each softmax's denominator only.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float,
        num_kv_heads: int,
        layer_name: str,
        *,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.layer_name = layer_name
        self.sliding_window = sliding_window
        spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale,
            dtype=torch.get_default_dtype(),
            window=sliding_window,
            soft_cap=logits_soft_cap,
            has_sinks=sinks is not None,
        )
        self.backend = select_backend(spec)(spec, sinks)
        if (config := get_current_atom_config()) is not None:
            config.compilation_config.state.add_layer(layer_name, self)

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, int, int, int]:
        """Shape of this layer's keys and of its values."""
        return num_blocks, self.num_kv_heads, block_size, self.head_dim

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of this layer's keys and values."""
        return 2 * self.num_kv_heads * block_size * self.head_dim * dtype.itemsize

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """``q [num_tokens, num_heads, head_dim]``, ``k`` and ``v [num_tokens, num_kv_heads, head_dim]`` ->
        ``[num_tokens, num_heads * head_dim]``."""
        output = torch.empty((len(q), self.num_heads, self.head_dim), dtype=q.dtype, device=q.device)
        if torch.compiler.is_compiling():
            torch.ops.aiter.unified_attention_with_output(q, k, v, output, self.layer_name)
        else:
            _run(self, self.attend, q, k, v, output)
        return output.flatten(-2)

    @property
    def fuses_rotation(self) -> bool:
        """Whether :meth:`forward_projected` may be called."""
        return self.backend.fuses_rotation

    def forward_projected(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Norm, rotation and attention of ``qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]``, which is
        written to: ``[num_tokens, num_heads * head_dim]``. See ``AttentionBackend.forward_projected``.
        """
        output = torch.empty((len(qkv), self.num_heads, self.head_dim), dtype=qkv.dtype, device=qkv.device)
        if torch.compiler.is_compiling():
            torch.ops.aiter.rotary_attention_with_output(qkv, cos, sin, weight, eps, output, self.layer_name)
        else:
            _run(self, self.attend_projected, qkv, cos, sin, weight, eps, output)
        return output.flatten(-2)

    def can_project(self, projection: LinearBase) -> bool:
        """Whether :meth:`forward_hidden` may be called with this layer's query, key and value projection."""
        return (
            self.backend.fuses_projection
            and type(projection.kernel) is ReferenceLinear
            and projection.bias is None
        )

    def forward_hidden(
        self,
        x: torch.Tensor,
        projection: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """As :meth:`forward_projected`, from ``x [num_tokens, hidden_size]`` and the projection's weight."""
        output = torch.empty((len(x), self.num_heads, self.head_dim), dtype=x.dtype, device=x.device)
        if torch.compiler.is_compiling():
            torch.ops.aiter.hidden_attention_with_output(
                x, projection, cos, sin, weight, eps, output, self.layer_name
            )
        else:
            _run(self, self.attend_hidden, x, projection, cos, sin, weight, eps, output)
        return output.flatten(-2)

    def attend_hidden(
        self,
        x: torch.Tensor,
        projection: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        output: torch.Tensor,
    ) -> None:
        """As :meth:`attend`, from what the projection takes."""
        metadata, cache = self._step_state()
        self.backend.forward_hidden(
            x, projection, cos, sin, weight, eps, cache.k_cache, cache.v_cache, metadata, output
        )

    def attend_projected(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        output: torch.Tensor,
    ) -> None:
        """As :meth:`attend`, from what the projection left."""
        metadata, cache = self._step_state()
        self.backend.forward_projected(
            qkv, cos, sin, weight, eps, cache.k_cache, cache.v_cache, metadata, output
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor) -> None:
        """Store ``k`` and ``v`` and write the attention of this step into ``output``, shaped as ``q``.

        Raises RuntimeError outside a forward context.
        """
        metadata, cache = self._step_state()
        self.backend.forward(q, k, v, cache.k_cache, cache.v_cache, metadata, output)

    def _step_state(self) -> tuple[AttentionMetaData, KVCacheTensor]:
        context = get_forward_context()
        metadata = context.attn_metadata.get(self.layer_name)
        if metadata is None:
            raise RuntimeError(
                f"no forward context is set for {self.layer_name}: call the model inside set_forward_context()"
            )
        return metadata, context.kv_cache_data[self.layer_name]

    def extra_repr(self) -> str:
        return f"{self.layer_name}, {self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {self.backend.name}"


def _run(layer: Attention, attend: Callable[..., None], *args: Any) -> None:
    """Call ``attend``, one of ``layer``'s, outside the recorded graph where its launches depend on host data."""
    if layer.backend.supports_token_graph:
        attend(*args)
    else:
        break_recording(attend, *args)


@mark_spliting_op(is_custom=True, mutates_args=("output",))
def unified_attention_with_output(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor, layer_name: str
) -> None:
    """Attention as compiled code sees it: one opaque op, which finds its layer by name in the forward context."""
    layer = get_forward_context().no_compile_layers[layer_name]
    _run(layer, layer.attend, q, k, v, output)


@mark_spliting_op(is_custom=True, mutates_args=("qkv", "output"))
def rotary_attention_with_output(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """The same with norm and rotation of the heads, for backends that do all of it in one pass."""
    layer = get_forward_context().no_compile_layers[layer_name]
    _run(layer, layer.attend_projected, qkv, cos, sin, weight, eps, output)


@mark_spliting_op(is_custom=True, mutates_args=("output",))
def hidden_attention_with_output(
    x: torch.Tensor,
    projection: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """The same with the projection before it, for backends that norm, rotate and store where it is made."""
    layer = get_forward_context().no_compile_layers[layer_name]
    _run(layer, layer.attend_hidden, x, projection, cos, sin, weight, eps, output)
