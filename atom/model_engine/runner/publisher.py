"""How a packed step reaches the device: from pinned memory to a fixed address, read by a launch or copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from atom.model_engine.runner.input_packer import RING_SIZE, PackedStep
from atom.utils import envs

if TYPE_CHECKING:
    from atom.model_engine.runner.device_tables import DeviceTables
    from atom.model_engine.runner.host_tables import HostTables

_ROUND = 256  # elements: copies have so few sizes that their views are kept


class Publisher:
    """Owns the host ring and the device's buffer. On the CPU a step is read where it was packed.

    ``ATOM_H2D_BACKEND``: ``packed`` lets a launch of a decode step read it from pinned memory (switching to the copy
    engine and back takes longer than reading a few KB) and copies other steps at once; ``direct`` copies section by
    section.
    """

    def __init__(self, capacity: int, device: torch.device):
        self._is_packed = envs.ATOM_H2D_BACKEND == "packed"
        self._device_buffer: torch.Tensor | None = None
        if device.type == "cpu":
            # calloc: a page is taken when it is first written, and most never are
            self._host = [torch.from_numpy(np.zeros(capacity, np.int32)) for _ in range(RING_SIZE)]
            return
        self._host = [torch.zeros(capacity, dtype=torch.int32, pin_memory=True) for _ in range(RING_SIZE)]
        self._device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._is_read = [torch.cuda.Event() for _ in range(RING_SIZE)]
        # (device, host) views by slot and number of rounds: making two costs as much as a quarter of the copy
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def buffers(self) -> list[np.ndarray]:
        """The ring, for the packer."""
        return [tensor.numpy() for tensor in self._host]

    @property
    def buffer(self) -> torch.Tensor:
        """What holds the step under way: the device's buffer, on the CPU the first of the ring."""
        return self._host[0] if self._device_buffer is None else self._device_buffer

    def wait_for(self, slot: int) -> None:
        """Return once the device has read ``slot``."""
        if self._device_buffer is not None:
            self._is_read[slot].synchronize()

    def deliver(self, step: PackedStep, tables: DeviceTables | HostTables) -> torch.Tensor:
        """As :meth:`publish`; and ``tables`` take over what the step changes there. A repeated one changes nothing."""
        if self._device_buffer is not None and step.is_repeat:
            return self._device_buffer
        if self._device_buffer is None or not self._is_packed or not tables.takes(step):
            packed = self.publish(step)
            tables.apply(packed, step)
            return packed
        tables.take(self._host[step.slot], self._device_buffer, step)
        self._is_read[step.slot].record()
        return self._device_buffer

    def publish(self, step: PackedStep) -> torch.Tensor:
        """Copy the step to the device: an int32 buffer of which the step's length is in use."""
        host = self._host[step.slot]
        if self._device_buffer is None:
            return host
        if self._is_packed:
            target, source = self._views_of(step.slot, -(-len(step.buffer) // _ROUND))
            target.copy_(source, non_blocking=True)
        else:
            for start, end in step.sections():
                self._device_buffer[start:end].copy_(host[start:end], non_blocking=True)
        self._is_read[step.slot].record()
        return self._device_buffer

    def _views_of(self, slot: int, num_rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``num_rounds`` rounds on the device and in the slot; what they hold past the step is never read."""
        views = self._views.get((slot, num_rounds))
        if views is None:
            size = num_rounds * _ROUND
            views = self._views[slot, num_rounds] = self._device_buffer[:size], self._host[slot][:size]
        return views
