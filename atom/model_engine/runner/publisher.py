"""How a packed step reaches the device: one asynchronous copy from pinned memory to a fixed address."""

from __future__ import annotations

import numpy as np
import torch

from atom.model_engine.runner.input_packer import RING_SIZE, PackedStep
from atom.utils import envs


class Publisher:
    """Owns the host ring and the device's buffer. On the CPU a step is read where it was packed.

    ``ATOM_H2D_BACKEND``: ``packed`` copies a step's buffer at once, ``direct`` section by section.
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

    def publish(self, step: PackedStep) -> torch.Tensor:
        """The step on the device: an int32 buffer of which the step's length is in use."""
        host = self._host[step.slot]
        if self._device_buffer is None:
            return host
        sections = [(0, len(step.buffer))] if self._is_packed else step.sections()
        for start, end in sections:
            self._device_buffer[start:end].copy_(host[start:end], non_blocking=True)
        self._is_read[step.slot].record()
        return self._device_buffer
