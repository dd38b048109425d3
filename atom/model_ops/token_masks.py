"""Bit masks over the vocabulary, applied to logits: ids that a grammar does not allow get minus infinity."""

from collections.abc import Callable

import numpy as np
import torch

from atom.core import TokenMasks
from atom.kernels.reference.sampling import mask_bits
from atom.model_ops.host_copy import to_device

SPARSE_SHARE = 1 / 16  # of the words: up to here single ids are cheaper than a pass over the vocabulary
_CHUNK = 4096  # bytes of bits at a time: their limits stay in the cache
# What a byte of bits makes of its eight logits: an upper limit. Free of branches, so any pattern costs the same.
_LIMITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LIMITS = np.where(_LIMITS, np.inf, -np.inf).astype(np.float32)


def apply_masks(
    logits: torch.Tensor,
    masks: TokenMasks,
    mask_bits: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = mask_bits,
) -> None:
    """Mask ``logits`` [n, vocab] in place, float32 on the CPU. Ids past the end of the bits are not allowed.

    ``mask_bits`` does it on other devices, see ``kernels.reference.sampling``.
    """
    bits = masks.bits[: len(masks.rows)]
    if logits.device.type == "cpu":
        rows = logits.numpy()
        for row, words in zip(masks.rows, bits, strict=True):
            mask_row(rows[row], words.view(np.uint32))
    else:
        rows = to_device(np.array(masks.rows, np.int64), logits.device)
        mask_bits(logits, rows, to_device(bits, logits.device))


def mask_row(logits: np.ndarray, words: np.ndarray) -> None:
    """One row [vocab] float32 by its bits [words] uint32: within a key of JSON a handful of ids is allowed,
    within a string all but a handful, and either is cheap."""
    limit = SPARSE_SHARE * len(words)
    some = np.flatnonzero(words)
    if len(some) <= limit:
        ids = _ids_of(some, words[some], len(logits))
        kept = logits[ids]
        logits.fill(-np.inf)
        logits[ids] = kept
        return
    logits[32 * len(words) :] = -np.inf
    words = ~words
    some = np.flatnonzero(words)
    if len(some) <= limit:
        logits[_ids_of(some, words[some], len(logits))] = -np.inf
    else:
        allowed = (~words).view(np.uint8)
        limits = np.empty((min(_CHUNK, len(allowed)), 8), np.float32)
        for start in range(0, len(allowed), _CHUNK):
            some_bits = allowed[start : start + _CHUNK]
            part = logits[8 * start : 8 * (start + len(some_bits))]
            # Every byte is an index; "clip" only spares the copy that "raise" makes.
            np.take(_LIMITS, some_bits, axis=0, mode="clip", out=limits[: len(some_bits)])
            np.minimum(part, limits.reshape(-1)[: len(part)], out=part)


def _ids_of(index: np.ndarray, words: np.ndarray, num_ids: int) -> np.ndarray:
    """Ids, below ``num_ids``, of the bits that are set in ``words`` at ``index``."""
    at, bit = np.nonzero(np.unpackbits(words.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little"))
    ids = index[at] * 32 + bit
    return ids[: np.searchsorted(ids, num_ids)]
