"""The paged KV cache: keys and values of a layer are ``[num_blocks, num_kv_heads, block_size, head_dim]``.

A slot is ``block * block_size + offset``.
"""

import torch

from atom.kernels.registry import register_kernel


@register_kernel("write_kv", "reference")
def write_kv(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store this step's keys and values.

    Args:
        k: ``[num_tokens, num_kv_heads, head_dim]``; ``v`` alike.
        keys: the layer's cache, written in place; ``values`` alike.
        slots: ``[num_tokens]`` int64; a token with slot -1 is not stored.
    """
    kept = (slots >= 0).nonzero().squeeze(-1)
    blocks, offsets = slots[kept] // keys.shape[2], slots[kept] % keys.shape[2]
    keys[blocks, :, offsets] = stored(k[kept], keys.dtype)
    values[blocks, :, offsets] = stored(v[kept], values.dtype)


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as a cache of ``dtype`` holds it: what is too large for fp8, and would be NaN, is its largest number."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.float().clamp(-largest, largest)
    return x.to(dtype)


def read_kv(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` positions of one sequence: ``[length, num_kv_heads, head_dim]``."""
    num_pages = -(-length // cache.shape[2])
    pages = cache[table[:num_pages].long()]  # [num_pages, num_kv_heads, block_size, head_dim]
    return pages.transpose(1, 2).flatten(0, 1)[:length]
