"""Where decode steps leave their ids for the host: pinned memory that the last kernel of a step writes itself.

A copy would switch to the copy engine and back between two steps. A recorded launch has fixed addresses, so it finds
its slot of a ring by a count of steps on the device. The host counts the replays that it has launched; a step that it
has not counted (a rehearsal, an eager one) makes it forget, and set the device's count before the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

# While a step's results wait to be read, three more may write: a graph that is recorded on demand for the next step is
# rehearsed and replayed first, and a device that nobody has set right goes on counting.
SLOTS = 4


class OutboxTensors(NamedTuple):
    """What the kernel gets."""

    number: torch.Tensor  # [1] int64 on the device: steps so far
    ids: torch.Tensor  # [SLOTS, room + 1] int64 on the host: the step's number, then its ids
    flags: torch.Tensor  # [SLOTS, room] bool on the host


@dataclass(slots=True)
class Letter:
    """A step's results in host memory: there once the device has done the step, gone when ``SLOTS`` more are."""

    token_ids: torch.Tensor  # [n] int64
    is_finite: torch.Tensor  # [n] bool
    number: int
    stamp: np.ndarray  # [1] int64: the number of the step that wrote last

    def check(self) -> None:
        """Raises RuntimeError where another step's results are there."""
        if self.stamp[0] != self.number:
            raise RuntimeError(
                f"results of step {self.number} were read, those of step {self.stamp[0]} are there"
            )


class Outbox:
    """Owns the ring, and counts.

    Args:
        room: the most sequences of a step.
        device: where steps run.
    """

    def __init__(self, room: int, device: torch.device):
        is_pinned = device.type != "cpu"
        self.tensors = OutboxTensors(
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros((SLOTS, room + 1), dtype=torch.int64, pin_memory=is_pinned),
            torch.zeros((SLOTS, room), dtype=torch.bool, pin_memory=is_pinned),
        )
        self._stamps = [row[:1].numpy() for row in self.tensors.ids]
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by slot and sequences
        self._count = 0
        self._is_counted = True

    def begin(self) -> None:
        """Before a step is launched: set the device's count right, if it is not."""
        if not self._is_counted:
            self.tensors.number.fill_(self._count)
            self._is_counted = True

    def forget(self) -> None:
        """Steps have run, or will have, that nobody counts."""
        self._is_counted = False

    def take(self, num_seqs: int) -> Letter | None:
        """What the step just launched will leave; None where the count is not known."""
        if not self._is_counted:
            return None
        self._count += 1
        slot = self._count % SLOTS
        views = self._views.get((slot, num_seqs))
        if views is None:
            _, ids, flags = self.tensors
            views = self._views[slot, num_seqs] = ids[slot, 1 : num_seqs + 1], flags[slot, :num_seqs]
        return Letter(*views, self._count, self._stamps[slot])
