"""Attention on CUDA and ROCm through Triton: decode and prefill over the same pages.

Launches depend on shapes alone, lengths and tables are read on the device: a recorded graph can hold any step.
"""

from __future__ import annotations

import torch

from atom.kernels.triton.decode_attention import decode_attention
from atom.kernels.triton.kv_cache import write_kv
from atom.kernels.triton.varlen_attention import count_tiles, varlen_attention
from atom.model_ops.attentions.backend import AttentionBackend, AttentionSpec
from atom.platforms import Platform
from atom.utils.forward_context import AttentionMetaData

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonAttention(AttentionBackend):
    name = "triton"
    supports_token_graph = True

    @classmethod
    def supports(cls, platform: Platform, spec: AttentionSpec) -> bool:
        return platform.supports("triton") and spec.dtype in _DTYPES and spec.head_dim <= 256

    def __init__(self, spec: AttentionSpec, sinks: torch.Tensor | None = None):
        super().__init__(spec, sinks)
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
        if metadata.num_prefill_seqs == 0 and metadata.max_seqlen_q == 1:
            decode_attention(
                q,
                keys,
                values,
                metadata.block_tables,
                metadata.table_rows,
                metadata.context_lens,
                output,
                **self._options,
            )
            return
        if metadata.backend_data is None:
            metadata.backend_data = count_tiles(metadata.cu_seqlens_q)
        varlen_attention(
            q,
            keys,
            values,
            metadata.block_tables,
            metadata.table_rows,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            metadata.backend_data,
            output,
            **self._options,
        )
