"""Attention on CUDA and ROCm through Triton: decode and prefill over the same pages.

Launches depend on shapes alone, lengths and tables are read on the device: a recorded graph can hold any step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom.kernels.triton import head_projection
from atom.kernels.triton.decode_attention import arrival_counters, decode_attention
from atom.kernels.triton.hopper import num_at_once
from atom.kernels.triton.kv_cache import write_kv
from atom.kernels.triton.prefill_table import Choices, PrefillLayer, choose, measured_choices
from atom.kernels.triton.rotary_cache import rotate_and_write
from atom.kernels.triton.varlen_attention import TileShape, layer_tile_shape, plan_tiles, varlen_attention
from atom.model_ops.attentions.backend import AttentionBackend, AttentionSpec
from atom.platforms import Platform, platform_of_device
from atom.utils.forward_context import AttentionMetaData

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def measured_for(spec: AttentionSpec) -> Choices:
    """What was measured of prefills of such layers on the device that they are built for."""
    if spec.window is not None or spec.soft_cap is not None or spec.dtype.itemsize != 2:
        return {}
    layer = PrefillLayer(spec.head_dim, spec.group_size)
    return measured_choices(platform_of_device(torch.get_default_device()), layer)


class TritonAttention(AttentionBackend):
    name = "triton"
    supports_token_graph = True
    fuses_rotation = True

    @classmethod
    def supports(cls, platform: Platform, spec: AttentionSpec) -> bool:
        return platform.supports("triton") and spec.dtype in _DTYPES and spec.head_dim <= 256

    def __init__(self, spec: AttentionSpec, sinks: torch.Tensor | None = None):
        super().__init__(spec, sinks)
        self.measured = measured_for(spec)
        self.fuses_projection = head_projection.supports(
            platform_of_device(torch.get_default_device()), spec.dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim
        )  # fmt: skip
        self._at_once = num_at_once(torch.get_default_device())
        # This layer's own: a layer's launches follow one another, whatever else a stream does.
        self._arrivals = arrival_counters(torch.get_default_device())
        self._options = {
            "scale": spec.scale,
            "window": spec.window,
            "soft_cap": spec.soft_cap,
            "sinks": sinks,
        }

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
        output: torch.Tensor,
    ) -> None:
        write_kv(k, v, keys, values, metadata.slot_mapping)
        self._attend(q, k, v, keys, values, metadata, output)

    def forward_projected(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
        output: torch.Tensor,
    ) -> None:
        rotate_and_write(qkv, self.spec.num_heads, cos, sin, weight, eps, keys, values, metadata.slot_mapping)
        self._attend_heads(qkv, keys, values, metadata, output)

    def forward_hidden(
        self,
        x: torch.Tensor,
        projection: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
        output: torch.Tensor,
    ) -> None:
        spec = self.spec
        if head_projection.takes(x, projection, keys):
            qkv = x.new_empty((len(x), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim))
            head_projection.launch(
                x, projection, qkv, spec.num_heads, cos, sin, weight, eps, keys, values, metadata.slot_mapping
            )
            self._attend_heads(qkv, keys, values, metadata, output)
        else:
            qkv = F.linear(x, projection).view(len(x), -1, spec.head_dim)
            self.forward_projected(qkv, cos, sin, weight, eps, keys, values, metadata, output)

    def _attend_heads(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
        output: torch.Tensor,
    ) -> None:
        num_heads, num_kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        self._attend(q, k, v, keys, values, metadata, output)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
        output: torch.Tensor,
    ) -> None:
        """Attention of a step whose keys and values are stored, and finite in ``k`` and ``v`` too."""
        if metadata.num_prefill_seqs == 0 and metadata.max_seqlen_q == 1:
            decode_attention(
                q,
                keys,
                values,
                metadata.block_tables,
                metadata.table_rows,
                metadata.context_lens,
                output,
                self._arrivals,
                **self._options,
            )
            return
        spec = self.spec
        shape = layer_tile_shape(
            q,
            k,
            v,
            keys,
            values,
            window=spec.window,
            soft_cap=spec.soft_cap,
            measured=self._measured_shape(metadata, len(q)),
        )
        varlen_attention(
            q,
            k,
            v,
            keys,
            values,
            metadata.block_tables,
            metadata.table_rows,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            output,
            tiles=self._tiles(shape.tokens(spec.group_size), len(q), metadata),
            shape=shape,
            **self._options,
        )

    def _measured_shape(self, metadata: AttentionMetaData, num_tokens: int) -> TileShape | None:
        if not self.measured:
            return None
        # A step that is recorded does not know its prompts: one of all tokens stands for them.
        choice = choose(self.measured, metadata.max_seqlen_q or num_tokens)
        return choice if isinstance(choice, TileShape) else None

    def prefill_sizes(self) -> tuple[int, ...]:
        sizes = sorted(self.measured)
        before = [None, *(self.measured[size] for size in sizes)]
        found = [size for size, last in zip(sizes, before, strict=False) if self.measured[size] != last]
        if self.fuses_projection:
            num_rows = (self.spec.num_heads + 2 * self.spec.num_kv_heads) * self.spec.head_dim
            found.append(head_projection.fewest_tokens(num_rows, self._at_once))
        return tuple(found)

    @staticmethod
    def _tiles(tile_tokens: int, num_tokens: int, metadata: AttentionMetaData) -> torch.Tensor:
        """The step's list of such tiles, made by the group's first layer that has them."""
        if metadata.backend_data is None:
            metadata.backend_data = {}
        if tile_tokens not in metadata.backend_data:
            metadata.backend_data[tile_tokens] = plan_tiles(
                metadata.cu_seqlens_q, metadata.context_lens, num_tokens, tile_tokens
            )
        return metadata.backend_data[tile_tokens]
