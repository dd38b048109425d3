"""Drives a model through forward contexts with a hand-made paged cache, and tiny checkpoints to build it from.

Pages are handed out in a shuffled order; pages that a sliding group no longer needs are taken back at once and
their table columns point at a poisoned page, so that a backend that reads outside the window is found out.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from atom.config_parts import KVCacheTensor
from atom.model_loader.hf_config import HFConfig
from atom.model_loader.loader import load_weights
from atom.model_loader.model_files import ModelFiles
from atom.models.base import CausalLM
from atom.models.registry import get_model_class
from atom.utils.forward_context import AttentionMetaData, ForwardContext, HeadWork, set_forward_context

POISON = 0  # page 0 of every group holds large values and belongs to nobody


def load_model(folder: Path, dtype: torch.dtype, **kwargs) -> CausalLM:
    """The model that ``folder`` (written by ``save_pretrained``) describes, loaded by our loader."""
    files = ModelFiles.resolve(str(folder))
    return build(files.hf_config, dtype, files, **kwargs)


def build(config: HFConfig, dtype: torch.dtype, files: ModelFiles, **kwargs) -> CausalLM:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cpu"):
            model = get_model_class(config.architectures)(config, **kwargs)
    finally:
        torch.set_default_dtype(previous)
    load_weights(model, files)
    return model.eval()


class PagedRunner:
    """A cache, block tables and the lengths of any number of sequences, named by strings."""

    def __init__(self, model: CausalLM, *, block_size: int = 4, num_blocks: int = 256, seed: int = 0):
        self.model = model
        self.block_size = block_size
        layers = model.attention_layers()
        self.dtype = next(iter(layers.values())).backend.spec.dtype
        self.groups = model.cache_groups(block_size, self.dtype)
        self.caches = {}
        for name, layer in layers.items():
            shape = layer.cache_shape(num_blocks, block_size)
            keys, values = (torch.zeros(shape, dtype=self.dtype) for _ in range(2))
            keys[POISON] = values[POISON] = 1e4
            self.caches[name] = KVCacheTensor(len(self.caches), keys, values)
        shuffled = random.Random(seed)
        self.free = [shuffled.sample(range(1, num_blocks), num_blocks - 1) for _ in self.groups]
        self.tables: dict[str, list[list[int]]] = {}
        self.lens: dict[str, int] = {}

    @torch.inference_mode()
    def step(
        self,
        prefill: dict[str, list[int]] | None = None,
        decode: dict[str, list[int]] | None = None,
        head: HeadWork | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run one step; returns each sequence's logits ``[len(ids), vocab_size]`` in fp32."""
        prefill, decode = prefill or {}, decode or {}
        chunks = [*prefill.items(), *decode.items()]
        starts = [self.lens.get(name, 0) for name, _ in chunks]
        positions = [s + i for s, (_, ids) in zip(starts, chunks, strict=True) for i in range(len(ids))]
        for name, ids in chunks:
            self._extend(name, len(ids))
        metadata = {}
        for g, group in enumerate(self.groups):
            metadata |= dict.fromkeys(group.layer_names, self._metadata(g, chunks, len(prefill)))
        context = ForwardContext(
            no_compile_layers=self.model.attention_layers(),
            attn_metadata=metadata,
            kv_cache_data=self.caches,
            head=head,
        )
        with set_forward_context(context):
            hidden = self.model(torch.tensor([i for _, ids in chunks for i in ids]), torch.tensor(positions))
            logits = self.model.compute_logits(hidden).float()
        for name, _ in chunks:
            self._give_back(name)
        parts = logits.split([len(ids) for _, ids in chunks])
        return {name: part for (name, _), part in zip(chunks, parts, strict=True)}

    def _extend(self, name: str, num_tokens: int) -> None:
        tables = self.tables.setdefault(name, [[] for _ in self.groups])
        self.lens[name] = self.lens.get(name, 0) + num_tokens
        for table, free in zip(tables, self.free, strict=True):
            while len(table) * self.block_size < self.lens[name]:
                table.append(free.pop())

    def _give_back(self, name: str) -> None:
        for group, table, free in zip(self.groups, self.tables[name], self.free, strict=True):
            if group.window is None:
                continue
            num_dead = max(0, self.lens[name] + 1 - group.window) // self.block_size
            for column in range(num_dead):
                if table[column] != POISON:
                    free.append(table[column])
                    table[column] = POISON

    def _metadata(self, group: int, chunks: list, num_prefill: int) -> AttentionMetaData:
        query_lens = [len(ids) for _, ids in chunks]
        context_lens = [self.lens[name] for name, _ in chunks]
        tables = [self.tables[name][group] for name, _ in chunks]
        width = max(map(len, tables))
        slots = [
            table[p // self.block_size] * self.block_size + p % self.block_size
            for table, q, c in zip(tables, query_lens, context_lens, strict=True)
            for p in range(c - q, c)
        ]
        return AttentionMetaData(
            num_prefill_seqs=num_prefill,
            num_prefill_tokens=sum(query_lens[:num_prefill]),
            query_lens_host=query_lens,
            context_lens_host=context_lens,
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=torch.tensor([t + [POISON] * (width - len(t)) for t in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )
