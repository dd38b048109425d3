"""Attention on the CPU over the paged cache.

Decode gathers the pages of all its sequences with one copy a cache and attends in one call; sequences of very
different length are gathered in a few classes, so that a long one does not pad the short ones. Prefill goes
sequence by sequence, reading this step's own keys directly where nothing is cached before them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from atom.kernels.cpu.attention import decode_attention, prefill_attention
from atom.model_ops.attentions.backend import AttentionBackend, AttentionSpec
from atom.platforms import Platform, get_platform
from atom.utils.forward_context import AttentionMetaData

# Gather all sequences together unless padding would more than double the work.
_MAX_PADDING = 2.0
_MASKED = -1e30  # finite in bf16 too: a fully masked row must not become NaN


@dataclass(slots=True)
class PrefillPart:
    """One prefill sequence: its query tokens, and the pages of what was cached before them."""

    tokens: slice
    context_len: int
    first_key: int
    rows: torch.Tensor | None  # [num_kv_heads * num_pages] rows of the flat cache; None: nothing is cached

    @property
    def first_query(self) -> int:
        return self.context_len - (self.tokens.stop - self.tokens.start)


@dataclass(slots=True)
class DecodePart:
    """Decode sequences of similar length, all with the same number of query tokens."""

    tokens: slice | torch.Tensor  # their rows of q, sequence after sequence
    num_seqs: int
    num_queries: int  # query tokens of a sequence
    rows: torch.Tensor  # [num_seqs * num_kv_heads * num_pages] rows of the flat cache
    mask: torch.Tensor | None  # [num_seqs, 1, num_queries, length]
    keys: slice  # of the gathered positions, those to attend to; all but for a single sequence
    has_padding: bool  # some sequence has context length 0


@dataclass(slots=True)
class StepPlan:
    """What all layers of a group share in one step."""

    write_rows: torch.Tensor  # [num_written * num_kv_heads] rows of the cache seen as [.., head_dim]
    written: torch.Tensor | None  # token indices to write; None: all
    num_tokens: int  # of the sequences; what follows is padding
    prefill: list[PrefillPart] = field(default_factory=list)
    decode: list[DecodePart] = field(default_factory=list)


class CpuPagedAttention(AttentionBackend):
    name = "cpu_paged"

    @classmethod
    def supports(cls, platform: Platform, spec: AttentionSpec) -> bool:
        return platform.name == "cpu"

    def __init__(self, spec: AttentionSpec, sinks: torch.Tensor | None = None):
        super().__init__(spec, sinks)
        has_fast_bf16 = get_platform("cpu").supports("fast_bf16_matmul")
        self.compute_dtype = spec.dtype if has_fast_bf16 else torch.float32

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
        plan = self._plan(metadata, keys.shape[2])
        k, v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
        self._write(k, keys, plan)
        self._write(v, values, plan)
        for part in plan.prefill:
            output[part.tokens] = self._prefill(q, k, v, keys, values, part)
        for part in plan.decode:
            output[part.tokens] = self._decode(q[part.tokens], keys, values, part)
        output[plan.num_tokens :] = 0.0

    def _write(self, x: torch.Tensor, cache: torch.Tensor, plan: StepPlan) -> None:
        if plan.written is not None:
            x = x[plan.written]
        cache.view(-1, self.spec.head_dim).index_copy_(
            0, plan.write_rows, x.to(cache.dtype).view(-1, self.spec.head_dim)
        )

    def _gather(self, cache: torch.Tensor, rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        """Pages as ``[num_seqs, num_kv_heads, length, head_dim]`` in the layer's dtype."""
        pages = cache.view(cache.shape[0] * cache.shape[1], -1).index_select(0, rows)
        pages = pages.view(num_seqs, self.spec.num_kv_heads, -1, self.spec.head_dim)
        return pages.to(self.spec.dtype)

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        part: PrefillPart,
    ) -> torch.Tensor:
        if part.rows is None:
            k, v = k[part.tokens].transpose(0, 1), v[part.tokens].transpose(0, 1)
        else:
            k = self._gather(keys, part.rows, 1)[0]
            v = self._gather(values, part.rows, 1)[0]
        return prefill_attention(
            q[part.tokens],
            k,
            v,
            first_key=part.first_key,
            first_query=part.first_query,
            scale=self.spec.scale,
            window=self.spec.window,
            soft_cap=self.spec.soft_cap,
            sinks=self.sinks,
            compute_dtype=self.compute_dtype,
        )

    def _decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: DecodePart
    ) -> torch.Tensor:
        spec, n, m = self.spec, part.num_seqs, part.num_queries
        k = self._gather(keys, part.rows, n)[:, :, part.keys]
        v = self._gather(values, part.rows, n)[:, :, part.keys]
        # Query heads of a kv head become rows of one product: [n, kv heads, group * m, head_dim].
        grouped = q.view(n, m, spec.num_kv_heads, spec.group_size, spec.head_dim)
        mask, sinks = part.mask, self.sinks
        if m == 1:
            grouped = grouped[:, 0]
        else:
            grouped = grouped.permute(0, 2, 3, 1, 4).reshape(n, spec.num_kv_heads, -1, spec.head_dim)
            mask = mask.repeat(1, 1, spec.group_size, 1)
        if sinks is not None:
            sinks = sinks.view(spec.num_kv_heads, spec.group_size).repeat_interleave(m, dim=-1)
        out = decode_attention(grouped, k, v, mask, scale=spec.scale, soft_cap=spec.soft_cap, sinks=sinks)
        if part.has_padding:
            out = out * (mask == 0).any(dim=-1, keepdim=True)
        if m > 1:
            out = out.view(n, spec.num_kv_heads, spec.group_size, m, spec.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(n * m, spec.num_heads, spec.head_dim)

    def _plan(self, metadata: AttentionMetaData, block_size: int) -> StepPlan:
        key = (block_size, self.spec.num_kv_heads, self.spec.window, self.spec.dtype)
        if metadata.backend_data is None:
            metadata.backend_data = {}
        plan = metadata.backend_data.get(key)
        if plan is None:
            plan = metadata.backend_data[key] = build_plan(metadata, block_size, self.spec)
        return plan


def build_plan(metadata: AttentionMetaData, block_size: int, spec: AttentionSpec) -> StepPlan:
    """Derive a step's page rows and masks; on the CPU, reading the metadata's tensors costs nothing."""
    slots, written = metadata.slot_mapping, None
    if slots.numel() and int(slots.min()) < 0:
        written = (slots >= 0).nonzero().squeeze(-1)
        slots = slots[written]
    heads = torch.arange(spec.num_kv_heads)
    rows = (slots // block_size)[:, None] * spec.num_kv_heads + heads
    write_rows = (rows * block_size + (slots % block_size)[:, None]).flatten()
    plan = StepPlan(write_rows, written, sum(metadata.query_lens_host))

    start = 0
    for i in range(metadata.num_prefill_seqs):
        stop = start + metadata.query_lens_host[i]
        plan.prefill.append(
            _prefill_part(metadata, i, slice(start, stop), metadata.context_lens_host[i], block_size, spec)
        )
        start = stop
    if metadata.num_seqs > metadata.num_prefill_seqs:
        plan.decode = _decode_parts(metadata, block_size, spec)
    return plan


def _prefill_part(
    metadata: AttentionMetaData,
    seq: int,
    tokens: slice,
    context_len: int,
    block_size: int,
    spec: AttentionSpec,
) -> PrefillPart:
    first_query = context_len - (tokens.stop - tokens.start)
    if first_query == 0:
        return PrefillPart(tokens, context_len, 0, None)
    oldest = 0 if spec.window is None else max(0, first_query - spec.window + 1)
    pages = slice(oldest // block_size, -(-context_len // block_size))
    blocks = metadata.block_tables[seq, pages].long()
    rows = blocks * spec.num_kv_heads + torch.arange(spec.num_kv_heads)[:, None]
    return PrefillPart(tokens, context_len, pages.start * block_size, rows.flatten())


@dataclass(slots=True)
class _DecodeSeqs:
    """Decode sequences with what is needed to find their pages."""

    context_lens: torch.Tensor  # [n] int64
    table: torch.Tensor  # [n, max_blocks]
    first_pages: list[int]  # page of the oldest position that some query of the sequence sees
    num_pages: list[int]

    def select(self, members: list[int]) -> _DecodeSeqs:
        return _DecodeSeqs(
            self.context_lens[members],
            self.table[members],
            [self.first_pages[i] for i in members],
            [self.num_pages[i] for i in members],
        )


def _decode_parts(metadata: AttentionMetaData, block_size: int, spec: AttentionSpec) -> list[DecodePart]:
    first_seq, start = metadata.num_prefill_seqs, metadata.num_prefill_tokens
    query_lens = metadata.query_lens_host[first_seq:]
    context_lens = metadata.context_lens[first_seq : metadata.num_seqs].long()
    table = metadata.block_tables[first_seq:]
    num_queries = query_lens[0]
    if any(n != num_queries for n in query_lens):
        # Uneven verify steps: every query token becomes a sequence of its own.
        counts = torch.tensor(query_lens)
        ends = counts.cumsum(0)
        num_after = ends.repeat_interleave(counts) - torch.arange(int(ends[-1])) - 1
        context_lens = context_lens.repeat_interleave(counts) - num_after
        table = table.repeat_interleave(counts, dim=0)
        num_queries = 1

    lens = context_lens.tolist()  # exact, where the host's lists are bounds
    window = spec.window
    firsts = [0 if window is None else max(0, n - num_queries + 1 - window) // block_size for n in lens]
    num_pages = [max(1, -(-n // block_size) - first) for n, first in zip(lens, firsts, strict=True)]
    seqs = _DecodeSeqs(context_lens, table, firsts, num_pages)
    if max(num_pages) * len(lens) <= _MAX_PADDING * sum(num_pages):
        tokens = slice(start, start + len(lens) * num_queries)
        return [_decode_part(seqs, tokens, num_queries, block_size, spec)]
    classes: dict[int, list[int]] = {}
    for i, count in enumerate(num_pages):
        classes.setdefault(count.bit_length(), []).append(i)
    parts = []
    for members in classes.values():
        tokens = start + torch.tensor(members)[:, None] * num_queries + torch.arange(num_queries)
        parts.append(_decode_part(seqs.select(members), tokens.flatten(), num_queries, block_size, spec))
    return parts


def _decode_part(
    seqs: _DecodeSeqs, tokens: slice | torch.Tensor, num_queries: int, block_size: int, spec: AttentionSpec
) -> DecodePart:
    """Page rows and mask of sequences that are padded to the most pages among them."""
    n, width, lens = len(seqs.num_pages), max(seqs.num_pages), seqs.context_lens.tolist()
    firsts = torch.tensor(seqs.first_pages)
    columns = (firsts[:, None] + torch.arange(width)).clamp_(max=seqs.table.shape[1] - 1)
    blocks = seqs.table.gather(1, columns).long()
    rows = (blocks[:, None] * spec.num_kv_heads + torch.arange(spec.num_kv_heads)[:, None]).flatten()
    if n == 1 and num_queries == 1 and lens[0] > 0:
        # One query of one sequence sees a contiguous run of positions: no mask.
        oldest = 0 if spec.window is None else max(0, lens[0] - spec.window)
        origin = seqs.first_pages[0] * block_size
        return DecodePart(tokens, 1, 1, rows, None, slice(oldest - origin, lens[0] - origin), False)
    position = firsts[:, None, None] * block_size + torch.arange(width * block_size)
    query = (seqs.context_lens[:, None] - num_queries + torch.arange(num_queries))[..., None]
    hidden = position > query
    if spec.window is not None:
        hidden |= position <= query - spec.window
    mask = torch.zeros(hidden.shape, dtype=spec.dtype).masked_fill_(hidden, _MASKED)[:, None]
    return DecodePart(tokens, n, num_queries, rows, mask, slice(None), min(lens) <= 0)
