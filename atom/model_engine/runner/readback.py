"""How the ids of a step reach the host: the step leaves them there itself, else they are copied into pinned memory that
is taken once; behind an event made once.
"""

from __future__ import annotations

import torch

from atom.model_engine.runner.input_packer import RING_SIZE
from atom.model_ops.outbox import Letter
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
        # Tensors over a slot, by slot and number of ids.
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        if device.type != "cpu":
            size = (_ID_BYTES + 1) * max_num_seqs
            self._ring = [
                (torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(RING_SIZE)
            ]

    def start(self, sampled: SampleResult, letter: Letter | None = None) -> SampleResult:
        """``sampled`` in host memory, to be read after its ``wait``; returns at once, whatever is under way.

        Args:
            letter: where the step that sampled leaves both itself, so that there is nothing to copy.
        """
        if not self._ring:
            return sampled
        num_ids = len(sampled.token_ids)
        if sampled.logprobs is not None or num_ids > self._max_num_seqs:
            return sampled.to_host()
        slot = self._next
        self._next = (slot + 1) % RING_SIZE
        buffer, arrival = self._ring[slot]
        if letter is not None:
            arrival.record()
            return SampleResult(letter.token_ids, letter.is_finite, None, arrival, letter)
        views = self._views.get((slot, num_ids))
        if views is None:
            end = _ID_BYTES * num_ids
            flags = buffer[end : end + num_ids].view(torch.bool)
            views = self._views[slot, num_ids] = buffer[:end].view(torch.int64), flags
        ids, flags = views
        ids.copy_(sampled.token_ids, non_blocking=True)
        flags.copy_(sampled.is_finite, non_blocking=True)
        arrival.record()
        return SampleResult(ids, flags, None, arrival)
