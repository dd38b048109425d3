"""Copies between host and device that neither side waits for."""

import numpy as np
import torch

STAGED_BYTES = 1 << 16  # as CUDA's programming guide has it: of so much pageable memory a copy starts at once


def to_device(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """``values`` on ``device``, without waiting for what is queued there; on the CPU in the array's own memory.

    Of pageable memory, up to 64 KB are taken before the call returns; more goes through pinned memory, which
    torch keeps until the device has read it.
    """
    tensor = torch.from_numpy(values)
    if values.nbytes > STAGED_BYTES and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in pinned memory, to be read once an event recorded after this call has passed."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
