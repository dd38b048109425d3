"""What the fused kernels of a decode step compute, in fp32 with one rounding where they store."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom.kernels.reference.attention import attend
from atom.kernels.reference.kv_cache import read_kv, stored


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``residual + act(rms_norm(x) @ weight^T + bias)``; with an activation ``weight`` is ``[gate | up]``.

    Args:
        x: ``[num_tokens, K]``; weight ``[N, K]``, with an activation ``[2 N, K]``.
        norm: ``[K]``, the norm's factor; None: no norm.
        activation: ``silu`` or ``gelu_tanh`` of the gate, times up; None: neither.

    Returns:
        ``[num_tokens, N]`` in x's dtype.
    """
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
    y = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


def fused_attention(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: list[int],
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    qk_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """Norm, rotation, cache write and attention of one token a sequence.

    Args:
        qkv: ``[num_seqs, (heads + 2 kv heads) * head_dim]``.
        keys: ``[num_blocks, kv heads, block_size, head_dim]``, written; values alike. They hold what was stored
            over ``scales``, key's and value's.
        block_tables: ``[num_seqs, max_blocks]``, each sequence's own.
        context_lens: keys of each sequence with this step's; 0 yields zeros.
        slots: ``[num_seqs]``; -1 stores nothing.
        cos, sin: ``[num_seqs, rotary_dim]``, the first half of sin negated.
        qk_norm: ``[heads + kv heads, head_dim]``.

    Returns:
        ``[num_seqs, heads * head_dim]`` in qkv's dtype.
    """
    num_kv_heads, page, dim = keys.shape[1:]
    heads = qkv.float().view(len(qkv), -1, dim)
    q_and_k, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if qk_norm is not None:
        q_and_k = q_and_k * torch.rsqrt(q_and_k.square().mean(-1, keepdim=True) + eps) * qk_norm.float()
    rotary_dim = cos.shape[-1]
    turned, rest = q_and_k[..., :rotary_dim], q_and_k[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.float()[:, None] + torch.cat((second, first), -1) * sin.float()[:, None]
    q_and_k = torch.cat((turned, rest), -1)
    q, k = q_and_k[:, :num_heads], q_and_k[:, num_heads:]
    outputs = []
    for i, length in enumerate(context_lens):
        slot = int(slots[i])
        if slot >= 0:
            clean = torch.nan_to_num(k[i], 0.0, 0.0, 0.0), torch.nan_to_num(v[i], 0.0, 0.0, 0.0)
            for cache, new, factor in zip((keys, values), clean, scales, strict=True):
                cache[slot // page, :, slot % page] = stored(new / factor, cache.dtype)
        if length == 0:
            outputs.append(torch.zeros_like(q[i]))
            continue
        own = (
            read_kv(cache, block_tables[i], length).float() * factor
            for cache, factor in zip((keys, values), scales, strict=True)
        )
        options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        outputs.append(attend(q[i : i + 1], *own, **options)[0])
    return torch.stack(outputs).to(qkv.dtype).flatten(1)


def greedy_head(
    x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor, eps: float, num_valid_ids: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[n, vocab]`` in x's dtype of ``x [n, hidden_size]``, and the best valid id, lowest on ties ``[n]``."""
    logits = fused_linear(x, weight, norm=norm, eps=eps)
    return logits, logits[:, :num_valid_ids].argmax(dim=-1)
