"""How the ids of a step reach the host: copies into pinned memory that is taken once, behind an event made once."""

from __future__ import annotations

import torch

from atom.model_engine.runner.input_packer import RING_SIZE
from atom.model_ops.sampler import SampleResult

_ID_BYTES = 8


class Readback:
    """A ring of pinned buffers. A result is valid until ``RING_SIZE`` further ones have been started; engines have at
    most two steps in flight.

    Args:
        max_num_seqs: the most ids of a step.
        device: where they are sampled; on the CPU there is nothing to copy.
    """

    def __init__(self, max_num_seqs: int, device: torch.device):
        self._max_num_seqs = max_num_seqs
        self._ring: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._next = 0
        # Tensors over a slot, by slot, number of ids and where the flags begin.
        self._views: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        if device.type != "cpu":
            size = (_ID_BYTES + 1) * max_num_seqs
            self._ring = [
                (torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(RING_SIZE)
            ]

    def start(self, sampled: SampleResult, packed: torch.Tensor | None = None) -> SampleResult:
        """``sampled`` in host memory, to be read after its ``wait``; starts copying and returns at once.

        Args:
            packed: ``[9 * m]`` uint8, what the ids ``[m]`` int64 and behind them the flags ``[m]`` bool lie in, of
                which ``sampled`` has the first: one copy then. None: one each.
        """
        if not self._ring:
            return sampled
        num_ids = len(sampled.token_ids)
        if sampled.logprobs is not None or num_ids > self._max_num_seqs:
            return sampled.to_host()
        slot = self._next
        self._next = (slot + 1) % RING_SIZE
        buffer, arrival = self._ring[slot]
        if packed is not None and packed.numel() <= buffer.numel():
            ids, flags = self._views_of(slot, num_ids, packed.numel() // (_ID_BYTES + 1))
            buffer[: packed.numel()].copy_(packed, non_blocking=True)
        else:
            ids, flags = self._views_of(slot, num_ids, self._max_num_seqs)
            ids.copy_(sampled.token_ids, non_blocking=True)
            flags.copy_(sampled.is_finite, non_blocking=True)
        arrival.record()
        return SampleResult(ids, flags, None, arrival)

    def _views_of(self, slot: int, num_ids: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``num_ids`` ids, and flags behind the ids' ``room``."""
        key = slot, num_ids, room
        if key not in self._views:
            buffer, first = self._ring[slot][0], _ID_BYTES * room
            ids = buffer[: _ID_BYTES * num_ids].view(torch.int64)
            self._views[key] = ids, buffer[first : first + num_ids].view(torch.bool)
        return self._views[key]
