"""Attention by the native kernels: one call that stores a step's keys and values, one that attends.

They work in fp32 over the cache as it is; queries in 16 bits are widened first. The step's metadata goes to the
kernels as it stands: which page, which tile, how the work is shared out is found there.
"""

from __future__ import annotations

import torch

from atom.errors import ConfigError
from atom.kernels.cpu.native.arguments import AttentionArguments, RopeArguments
from atom.kernels.cpu.native.library import NativeLibrary, native_library, pointer
from atom.model_ops.attentions.backend import AttentionBackend, AttentionSpec
from atom.platforms import Platform
from atom.utils.forward_context import AttentionMetaData

MAX_HEAD_DIM = 512  # as in attention.h
MAX_GROUP_WIDTH = 128 * 1024  # query heads of a kv head x head_dim, which a thread's scratch holds thrice
_SMALL = 16 * 1024  # elements: storing fewer is faster than waking the other threads


class CpuNativeAttention(AttentionBackend):
    name = "cpu_native"

    @classmethod
    def supports(cls, platform: Platform, spec: AttentionSpec) -> bool:
        return (
            platform.name == "cpu"
            and spec.dtype in (torch.bfloat16, torch.float32)
            and spec.head_dim % 16 == 0
            and spec.head_dim <= MAX_HEAD_DIM
            and spec.group_size * spec.head_dim <= MAX_GROUP_WIDTH
            and native_library() is not None
        )

    def __init__(self, spec: AttentionSpec, sinks: torch.Tensor | None = None):
        """Raises ConfigError where there is no library, which ``supports`` says before."""
        super().__init__(spec, sinks)
        library = native_library()
        if library is None:
            raise ConfigError("attention backend cpu_native: there are no native kernels on this machine")
        self._library: NativeLibrary = library
        if library.num_threads != torch.get_num_threads():
            library.set_threads(torch.get_num_threads())
        self._sinks: torch.Tensor | None = None  # in fp32, from the first step on, when they are loaded

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
        if keys.dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(f"attention backend cpu_native: a cache in {keys.dtype} is not supported")
        num_tokens = q.shape[0]
        if num_tokens == 0:
            return
        self._store(k, v, keys, values, metadata)
        wide_q = q.reshape(num_tokens, -1).float()
        wide_out = output if output.dtype is torch.float32 else torch.empty_like(output, dtype=torch.float32)
        tables = metadata.block_tables
        if metadata.table_rows is not None:
            tables = tables[metadata.table_rows]
        if self.sinks is not None and self._sinks is None:
            self._sinks = self.sinks.float().contiguous()
        spec = self.spec
        arguments = AttentionArguments(
            q=wide_q.data_ptr(),
            ldq=wide_q.stride(0),
            out=wide_out.data_ptr(),
            ldo=spec.num_heads * spec.head_dim,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=keys.shape[2],
            cache_is_bf16=keys.dtype is torch.bfloat16,
            scale=spec.scale,
            soft_cap=spec.soft_cap or 0.0,
            window=spec.window or 0,
            sinks=pointer(self._sinks),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            block_tables=tables.data_ptr(),
            table_stride=tables.stride(0),
            cu_seqlens_q=metadata.cu_seqlens_q.data_ptr(),
            context_lens=metadata.context_lens.data_ptr(),
            num_seqs=metadata.num_seqs,
            num_tokens=num_tokens,
        )
        self._library.call("atom_attention", arguments)
        if wide_out is not output:
            output.copy_(wide_out)

    def _store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetaData,
    ) -> None:
        """The kernel that rotates and stores, with no queries and nothing to rotate."""
        rows = torch.cat((k, v), dim=1).float()
        slots = metadata.slot_mapping
        arguments = RopeArguments(
            qkv=rows.data_ptr(),
            ld=rows.stride(0),
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            cache_is_bf16=keys.dtype is torch.bfloat16,
            block_size=keys.shape[2],
            slots=slots.data_ptr(),
            m=min(len(rows), len(slots)),
        )
        self._library.call("atom_rope_and_cache", arguments, alone=rows.numel() <= _SMALL)
