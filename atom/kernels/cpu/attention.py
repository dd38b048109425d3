"""Attention for the CPU out of torch's products: decode for many sequences at once, prefill by query blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_QUERY_BLOCK = 128  # rows of a prefill block; scores of a block stay in cache for common contexts


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a few query rows a sequence over keys that were gathered and padded to one length.

    Args:
        q: ``[num_seqs, num_kv_heads, rows, head_dim]``; rows are the query heads of the kv head, times the
            query tokens of the sequence.
        k: ``[num_seqs, num_kv_heads, length, head_dim]``; ``v`` alike.
        mask: added to the scores, ``[num_seqs, 1, 1 or rows, length]`` in q's dtype; None sees everything.
        sinks: ``[num_kv_heads, rows]``.
    """
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores += mask
    return torch.matmul(_softmax(scores, None if sinks is None else sinks[..., None]), v.float()).to(q.dtype)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first_key: int,
    first_query: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Causal attention of one sequence's chunk, in blocks of query rows.

    All heads that share a key/value head are packed into one product, and only keys that some row of the
    block can see are touched; masks apply to the diagonal and to the window's edge alone.

    Args:
        q: ``[query_len, num_heads, head_dim]`` at positions ``first_query`` and on.
        k: ``[num_kv_heads, num_keys, head_dim]`` at positions ``first_key`` and on, up to the last query;
            ``v`` alike.
        sinks: ``[num_heads]``.
        compute_dtype: of the two products; the softmax is in fp32.

    Returns:
        ``[query_len, num_heads, head_dim]`` in q's dtype.
    """
    query_len, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    group = num_heads // num_kv_heads
    k, v = k.to(compute_dtype), v.to(compute_dtype)
    grouped = q.view(query_len, num_kv_heads, group, head_dim)
    out = torch.empty(query_len, num_kv_heads, group, head_dim, dtype=q.dtype)
    for start in range(0, query_len, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, query_len)
        rows = stop - start
        position = first_query + start
        low = first_key if window is None else max(first_key, position - window + 1)
        keys = slice(low - first_key, position + rows - first_key)
        hidden = _hidden_columns(rows, position - low, window)
        for head in range(num_kv_heads):
            block = grouped[start:stop, head].transpose(0, 1).reshape(group * rows, head_dim)
            block = (block.float() * scale).to(compute_dtype)
            scores = torch.mm(block, k[head, keys].t()).float().view(group, rows, -1)
            if soft_cap is not None:
                scores.div_(soft_cap).tanh_().mul_(soft_cap)
            for columns, mask in hidden:
                scores[..., columns].masked_fill_(mask, -torch.inf)
            sink = None if sinks is None else sinks[head * group : (head + 1) * group, None, None]
            weights = _softmax(scores, sink).view(group * rows, -1)
            values = torch.mm(weights.to(compute_dtype), v[head, keys])
            out[start:stop, head] = values.view(group, rows, head_dim).transpose(0, 1)
    return out.view(query_len, num_heads, head_dim)


def _hidden_columns(rows: int, diagonal: int, window: int | None) -> list[tuple[slice, torch.Tensor]]:
    """Which of a block's key columns need a mask, and the mask.

    Row ``r`` sees columns ``(diagonal + r - window, diagonal + r]``; columns up to ``diagonal + rows - 1`` exist.
    """
    row = torch.arange(rows)[:, None]
    parts = []
    if rows > 1:  # the diagonal square
        parts.append((slice(diagonal, diagonal + rows), torch.arange(rows) > row))
    if window is not None and diagonal + rows > window:  # the oldest keys leave the window row by row
        num_edge = diagonal + rows - window
        parts.append((slice(0, num_edge), torch.arange(num_edge) <= row + diagonal - window))
    return parts


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension in fp32; ``sinks`` (broadcast over it) join the denominator."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
