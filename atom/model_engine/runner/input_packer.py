"""Everything a step needs from the host, in one int32 buffer. numpy only.

    rows [n] | query lengths [n] | starts [n] | header | patches per cache group [p_g, 3] | ids of prefill rows

``starts`` is read for prefill rows alone: a decode row's position is on the device. The header says what a launch
cannot be told that is recorded: number of prefill rows, where their ids begin, number of patches of each group.
Shipping one buffer makes one host-to-device copy a step; ranks other than 0 receive the same bytes.

``n`` is padded to what a recorded graph was recorded with: padded sequences have the trash row, and one query
token in a decode step, none in a prefill.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from atom.core import ScheduledBatch, Sequence

_NOTHING = (None, None, 0)
RING_SIZE = 3  # a slot is written again only when the step that read it has long ended


def header_size(num_groups: int) -> int:
    """Elements between the starts and the patches."""
    return 2 + num_groups


@dataclass(slots=True)
class PackedStep:
    """One packed step: the used part of a ring buffer and where its sections begin."""

    buffer: np.ndarray  # [used] int32
    slot: int  # of the ring
    num_seqs: int  # without padding
    running_bs: int  # with padding
    num_prefill_seqs: int
    num_tokens: int  # without padding
    num_prefill_tokens: int
    patch_counts: list[int]  # per cache group
    is_repeat: bool = False  # whether what a decode reads is what the step before this one shipped

    @property
    def patch_offset(self) -> int:
        return 3 * self.running_bs + header_size(len(self.patch_counts))

    @property
    def ids_offset(self) -> int:
        return self.patch_offset + 3 * sum(self.patch_counts)

    def sections(self) -> list[tuple[int, int]]:
        """Begin and end of each section that holds anything."""
        n = self.running_bs
        ends = [n, 2 * n, 2 * n + self.num_prefill_seqs, self.ids_offset, len(self.buffer)]
        starts = [0, n, 2 * n, 3 * n, self.ids_offset]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if end > start]


def _ids(seq: Sequence, start: int, length: int) -> np.ndarray | list[int]:
    """Ids ``[start, start + length)``; those of a prompt came as int32, and a list costs 40 ns an element."""
    if seq.packed_prompt is None or start + length > seq.num_prompt_tokens:
        return seq.token_ids[start : start + length]
    return np.frombuffer(seq.packed_prompt, np.int32, length, 4 * start)


class InputPacker:
    """Packs steps into a ring of buffers of fixed address (pinned memory where the device has it).

    Args:
        trash_row: the row of padded sequences.
        buffers: ``RING_SIZE`` int32 arrays of at least :meth:`capacity` elements; None allocates them.
        wait_for: called with a slot's number before it is written; returns once nobody reads it any more.
        num_groups: cache groups, for steps of nothing but padding.
    """

    def __init__(
        self,
        capacity: int,
        trash_row: int = 0,
        buffers: list[np.ndarray] | None = None,
        wait_for: Callable[[int], None] | None = None,
        num_groups: int = 1,
    ):
        self._ring = buffers or [np.zeros(capacity, np.int32) for _ in range(RING_SIZE)]
        self._trash_row = trash_row
        self._wait_for = wait_for
        self._num_groups = num_groups
        self._next = 0
        # Lists of rows and query lengths, as objects, and the padding that each slot holds.
        self._packed: list[tuple[list[int] | None, list[int] | None, int]] = [_NOTHING] * len(self._ring)
        self._last: PackedStep | None = None  # the last step, if it was a decode

    @staticmethod
    def capacity(max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int, num_groups: int) -> int:
        """Elements that hold the largest step: every row admitted at once with a whole-prompt prefix hit."""
        rows = max_num_seqs * (3 + 3 * num_groups * max_blocks_per_seq)
        return rows + header_size(num_groups) + max_num_tokens

    def pack(self, batch: ScheduledBatch, running_bs: int | None = None) -> PackedStep:
        """Pack ``batch``, padded to ``running_bs`` sequences. A decode of the rows of the step before, without new
        blocks, says nothing new: it is that step again.
        """
        num_seqs = len(batch.rows)
        n = num_seqs if running_bs is None else running_bs
        num_prefill = batch.num_prefill_seqs
        last = self._last
        if last is not None and not num_prefill and last.running_bs == n and not any(batch.patches):
            rows, lengths, _ = self._packed[last.slot]
            if rows is batch.rows and lengths is batch.num_scheduled:
                return self._repeat(last)
        slot, buffer = self._take_slot()
        rows, lengths, kept_n = self._packed[slot]
        # A steady decode batch keeps its lists.
        if rows is not batch.rows or lengths is not batch.num_scheduled or kept_n != n:
            buffer[:num_seqs] = batch.rows
            buffer[num_seqs:n] = self._trash_row
            buffer[n : n + num_seqs] = batch.num_scheduled
            buffer[n + num_seqs : 2 * n] = 0 if num_prefill else 1
            self._packed[slot] = (batch.rows, batch.num_scheduled, n)
        if num_prefill:
            buffer[2 * n : 2 * n + num_prefill] = batch.starts[:num_prefill]
        counts = [len(patches) for patches in batch.patches]
        end = 3 * n + header_size(len(counts))
        for patches in batch.patches:
            if patches:
                used = 3 * len(patches)
                buffer[end : end + used] = np.fromiter(chain.from_iterable(patches), np.int32, used)
                end += used
        first_id = end
        buffer[3 * n : 3 * n + header_size(len(counts))] = (num_prefill, first_id, *counts)
        for i in range(num_prefill):
            start, length = batch.starts[i], batch.num_scheduled[i]
            buffer[end : end + length] = _ids(batch.seqs[i], start, length)
            end += length
        step = PackedStep(
            buffer[:end], slot, num_seqs, n, num_prefill, batch.num_tokens, end - first_id, counts
        )
        self._last = None if num_prefill else step
        return step

    def _repeat(self, last: PackedStep) -> PackedStep:
        if not last.is_repeat:
            counts = [0] * len(last.patch_counts)
            end = 3 * last.running_bs + header_size(len(counts))
            self._last = replace(last, buffer=last.buffer[:end], patch_counts=counts, is_repeat=True)
        return self._last

    def padding(self, running_bs: int, is_prefill: bool) -> PackedStep:
        """A step of nothing but padding, for recording."""
        slot, buffer = self._take_slot()
        self._packed[slot], self._last = _NOTHING, None
        buffer[:running_bs] = self._trash_row
        buffer[running_bs : 2 * running_bs] = 0 if is_prefill else 1
        buffer[2 * running_bs : 3 * running_bs] = 0
        num_prefill = 1 if is_prefill else 0  # an empty one: it makes the step a prefill
        counts = [0] * self._num_groups
        end = 3 * running_bs + header_size(len(counts))
        buffer[3 * running_bs : end] = (num_prefill, end, *counts)
        return PackedStep(buffer[:end], slot, num_prefill, running_bs, num_prefill, 0, 0, counts)

    def _take_slot(self) -> tuple[int, np.ndarray]:
        slot = self._next
        self._next = (slot + 1) % len(self._ring)
        if self._wait_for is not None:
            self._wait_for(slot)
        return slot, self._ring[slot]
