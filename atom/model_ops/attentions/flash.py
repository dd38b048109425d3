"""FlashAttention as PyTorch ships it, for eager prefills whose prompts have nothing cached; Triton does the rest.

Asked for by name it takes all of those; otherwise those for which ``prefill_table`` has measured it to be the fastest.
PyTorch's kernel reads contiguous keys. (Its page table needs pages of 256 tokens in FlashAttention 2.) A recorded
graph serves steps with and without cached prefixes alike, so it always holds Triton's kernel.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from atom.kernels.triton.prefill_table import TORCH, choose
from atom.model_ops.attentions.backend import AttentionSpec, is_asked_for
from atom.model_ops.attentions.triton import TritonAttention, measured_for
from atom.platforms import Platform
from atom.utils.forward_context import AttentionMetaData


@cache
def varlen_parameters() -> frozenset[str]:
    """Names that this version's ``varlen_attn`` takes; empty where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


class FlashAttention(TritonAttention):
    name = "flash_attention"

    @classmethod
    def supports(cls, platform: Platform, spec: AttentionSpec) -> bool:
        return (
            platform.name == "cuda"
            and super().supports(platform, spec)
            and spec.dtype in (torch.float16, torch.bfloat16)
            and spec.soft_cap is None
            and not spec.has_sinks
            and spec.head_dim % 8 == 0
            and {"scale", "window_size"} <= varlen_parameters()
        )

    @classmethod
    def is_preferred(cls, spec: AttentionSpec) -> bool:
        return TORCH in measured_for(spec).values()

    def __init__(self, spec: AttentionSpec, sinks: torch.Tensor | None = None):
        super().__init__(spec, sinks)
        self._is_always = is_asked_for(self.name) or TORCH not in self.measured.values()
        self._varlen_options: dict[str, Any] = {"scale": spec.scale}
        reach = -1 if spec.window is None else spec.window - 1
        self._varlen_options["window_size"] = (reach, 0)
        if "enable_gqa" in varlen_parameters():
            self._varlen_options["enable_gqa"] = spec.group_size > 1

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
        if not self._takes(metadata, len(q)):
            super()._attend(q, k, v, keys, values, metadata, output)
            return
        from torch.nn.attention.varlen import varlen_attn

        cu_seqlens, longest = metadata.cu_seqlens_q, metadata.max_seqlen_q
        result = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **self._varlen_options)
        output.copy_(result)

    def _takes(self, metadata: AttentionMetaData, num_tokens: int) -> bool:
        if not is_uncached_prefill(metadata, num_tokens):
            return False
        return self._is_always or choose(self.measured, metadata.max_seqlen_q) == TORCH


def is_uncached_prefill(metadata: AttentionMetaData, num_tokens: int) -> bool:
    """Whether the step is nothing but prompts from their beginning, without padding. A rehearsed step is not."""
    return (
        metadata.num_prefill_tokens == num_tokens
        and metadata.num_prefill_seqs == metadata.num_seqs
        and metadata.query_lens_host == metadata.context_lens_host
    )
