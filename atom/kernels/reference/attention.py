"""Causal attention over the paged cache, one sequence at a time, in fp32."""

from __future__ import annotations

import torch

from atom.kernels.reference.kv_cache import read_kv
from atom.kernels.registry import register_kernel


@register_kernel("paged_attention", "reference")
def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    query_lens: list[int],
    context_lens: list[int],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one or more query tokens a sequence, whose keys are already in the cache.

    Args:
        q: ``[num_tokens, num_heads, head_dim]``, sequence after sequence.
        keys: ``[num_blocks, num_kv_heads, block_size, head_dim]``; ``values`` alike.
        block_table: ``[num_seqs, max_blocks]``.
        query_lens: tokens of each sequence in ``q``.
        context_lens: keys visible to each sequence's last query token; the others see fewer, causally.
        window: a query sees itself and the ``window - 1`` positions before it.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.
        sinks: ``[num_heads]`` logits that join each softmax's denominator only.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in q's dtype; zeros for a sequence of context length 0.
    """
    outputs = []
    start = 0
    for table, query_len, context_len in zip(block_table, query_lens, context_lens, strict=True):
        rows = q[start : start + query_len]
        start += query_len
        if context_len == 0:
            outputs.append(torch.zeros_like(rows))
            continue
        k, v = read_kv(keys, table, context_len), read_kv(values, table, context_len)
        outputs.append(attend(rows, k, v, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks))
    return torch.cat(outputs) if outputs else torch.empty_like(q)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last ``len(q)`` positions of one sequence over all of its positions.

    ``q [query_len, num_heads, head_dim]``; ``k``, ``v [context_len, num_kv_heads, head_dim]``.
    """
    query_len, num_heads, _ = q.shape
    context_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    wide_k = k.float().repeat_interleave(group, dim=1)
    wide_v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key_position = torch.arange(context_len, device=q.device)
    query_position = key_position[context_len - query_len :, None]
    hidden = key_position > query_position
    if window is not None:
        hidden |= key_position <= query_position - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(num_heads, query_len, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_v).to(q.dtype)
