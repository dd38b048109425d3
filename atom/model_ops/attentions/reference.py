"""The naive backend: one sequence at a time in fp32, on any device. What the others are compared with."""

from __future__ import annotations

import torch

from atom.kernels.reference.attention import paged_attention
from atom.kernels.reference.kv_cache import write_kv
from atom.model_ops.attentions.backend import AttentionBackend, AttentionSpec
from atom.platforms import Platform
from atom.utils.forward_context import AttentionMetaData


class ReferenceAttention(AttentionBackend):
    name = "reference"

    @classmethod
    def supports(cls, platform: Platform, spec: AttentionSpec) -> bool:
        return True

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
        rows = metadata.table_rows
        write_kv(
            k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0), keys, values, metadata.slot_mapping
        )
        query_lens = metadata.cu_seqlens_q.diff().tolist()
        num_tokens = sum(query_lens)
        output[num_tokens:] = 0.0
        output[:num_tokens] = paged_attention(
            q[:num_tokens],
            keys,
            values,
            metadata.block_tables if rows is None else metadata.block_tables[rows],
            query_lens,
            metadata.context_lens.tolist(),
            scale=self.spec.scale,
            window=self.spec.window,
            soft_cap=self.spec.soft_cap,
            sinks=self.sinks,
        )
