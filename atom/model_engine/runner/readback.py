"""How the ids of a step reach the host: whoever samples leaves them there itself, else they are copied; into pinned
memory that is taken once, behind an event made once.
"""

from __future__ import annotations

import torch

from atom.model_engine.runner.input_packer import RING_SIZE
from atom.model_ops.outbox import Letter
from atom.model_ops.sampler import SampleResult

_ID_BYTES = 8


class Readback:
    """A ring of pinned buffers, the ids and behind their room the flags. A result is valid until ``RING_SIZE`` further
    ones have been started; engines have at most two steps in flight.

    Args:
        max_num_seqs: the most ids of a step.
        device: where they are sampled; on the CPU there is nothing to copy.
    """

    def __init__(self, max_num_seqs: int, device: torch.device):
        self._max_num_seqs = max_num_seqs
        # At 16 bytes: kernels are compiled for that.
        self._flags_at = _ID_BYTES * (max_num_seqs + max_num_seqs % 2)
        self._ring: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._next = 0
        self._given: torch.Tensor | None = None  # ids of the next slot, if somebody writes there
        # Tensors over a slot, by slot and number of ids.
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        if device.type != "cpu":
            size = self._flags_at + max_num_seqs
            self._ring = [
                (torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(RING_SIZE)
            ]

    def room(self, num_ids: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where kernels may write the next step's ids ``[num_ids]`` int64 and flags ``[num_ids]`` bool; None where
        they had better be copied. Pinned memory is slow to read for a device.
        """
        if not self._ring or not 0 < num_ids <= self._max_num_seqs:
            return None
        views = self._views_of(self._next, num_ids)
        self._given = views[0]
        return views

    def start(self, sampled: SampleResult, letter: Letter | None = None) -> SampleResult:
        """``sampled`` in host memory, to be read after its ``wait``; returns at once, whatever is under way.

        Args:
            sampled: copied, unless its tensors are those of the last :meth:`room`.
            letter: where the step that sampled leaves both itself.
        """
        if not self._ring:
            return sampled
        num_ids, given = len(sampled.token_ids), self._given
        self._given = None
        if sampled.logprobs is not None or num_ids > self._max_num_seqs:
            return sampled.to_host()
        slot = self._next
        self._next = (slot + 1) % RING_SIZE
        arrival = self._ring[slot][1]
        if letter is not None:
            sampled = SampleResult(letter.token_ids, letter.is_finite, letter=letter)
        elif sampled.token_ids is not given:
            ids, flags = self._views_of(slot, num_ids)
            ids.copy_(sampled.token_ids, non_blocking=True)
            flags.copy_(sampled.is_finite, non_blocking=True)
            sampled = SampleResult(ids, flags)
        arrival.record()
        sampled.arrival = arrival
        return sampled

    def _views_of(self, slot: int, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
        views = self._views.get((slot, num_ids))
        if views is None:
            buffer, at = self._ring[slot][0], self._flags_at
            ids, flags = buffer[: _ID_BYTES * num_ids], buffer[at : at + num_ids]
            views = self._views[slot, num_ids] = ids.view(torch.int64), flags.view(torch.bool)
        return views
