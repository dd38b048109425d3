"""Everything a step needs from the host, in one int32 buffer. numpy only.

    rows [n] | query lengths [n] | starts [n] | patches per cache group [p_g, 3] | ids of prefill rows

``starts`` is read for prefill rows alone: a decode row's position is on the device. Shipping one buffer
makes one host-to-device copy a step; ranks other than 0 receive the same bytes.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from atom.core import ScheduledBatch

RING_SIZE = 3  # a slot is written again only when the step that read it has long ended


@dataclass(slots=True)
class PackedStep:
    """One packed step: the used part of a ring buffer and where its sections begin."""

    buffer: np.ndarray  # [used] int32
    num_seqs: int
    num_prefill_seqs: int
    num_tokens: int
    num_prefill_tokens: int
    patch_counts: list[int]  # per cache group

    @property
    def patch_offset(self) -> int:
        return 3 * self.num_seqs

    @property
    def ids_offset(self) -> int:
        return 3 * (self.num_seqs + sum(self.patch_counts))


class InputPacker:
    """Packs steps into a ring of buffers of fixed address (pinned memory where the device has it).

    Args:
        buffers: ``RING_SIZE`` int32 arrays of at least :meth:`capacity` elements; None allocates them.
    """

    def __init__(self, capacity: int, buffers: list[np.ndarray] | None = None):
        self._ring = buffers or [np.zeros(capacity, np.int32) for _ in range(RING_SIZE)]
        self._next = 0
        self._packed_rows: list[list[int] | None] = [None] * len(
            self._ring
        )  # the list object each slot holds

    @staticmethod
    def capacity(max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int, num_groups: int) -> int:
        """Elements that hold the largest step: every row admitted at once with a whole-prompt prefix hit."""
        return max_num_seqs * (3 + 3 * num_groups * max_blocks_per_seq) + max_num_tokens

    def pack(self, batch: ScheduledBatch) -> PackedStep:
        slot = self._next
        buffer = self._ring[slot]
        self._next = (slot + 1) % len(self._ring)
        n = len(batch.rows)
        if self._packed_rows[slot] is not batch.rows:  # a steady decode batch keeps its list of rows
            buffer[:n] = batch.rows
            self._packed_rows[slot] = batch.rows
        buffer[n : 2 * n] = batch.num_scheduled
        num_prefill = batch.num_prefill_seqs
        if num_prefill:
            buffer[2 * n : 2 * n + num_prefill] = batch.starts[:num_prefill]
        end = 3 * n
        counts = []
        for patches in batch.patches:
            counts.append(len(patches))
            if patches:
                used = 3 * len(patches)
                buffer[end : end + used] = list(chain.from_iterable(patches))
                end += used
        first_id = end
        for i in range(num_prefill):
            start, length = batch.starts[i], batch.num_scheduled[i]
            buffer[end : end + length] = batch.seqs[i].token_ids[start : start + length]
            end += length
        return PackedStep(buffer[:end], n, num_prefill, batch.num_tokens, end - first_id, counts)
