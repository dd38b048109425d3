"""Recordings where there are no device graphs: the function runs again, its regions in the recorded order.

Everything that a caller can see is as on a device: addresses stay, outputs die at the next replay, what was baked
in is checked. So the CPU serves and tests the code that records and replays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from atom.utils.recorded_values import deliver, extent, map_tensors, tensors_in
from atom.utils.recording import Recording, listening, region_name


class PythonRecording(Recording):
    """Without device graphs: a replay runs the function again.

    Results lie in slots of ``pool``, so that addresses stay and outputs die as they do on a device.
    """

    def __init__(self, name: str, pool: HostPool, owner: object, breaks: bool = True) -> None:
        super().__init__(name)
        self._pool = pool
        self._owner = weakref.ref(owner)
        self._breaks = breaks
        self._function: Callable[[], Any] | None = None
        self._results: list[Any] = []  # of each region
        self._num_slots = 0
        self._next_region = 0

    @property
    def num_segments(self) -> int:
        return self.num_regions + 1

    def record(self, function: Callable[[], Any]) -> Any:
        with self._recording():
            before = self._pool.num_bytes
            with listening(self if self._breaks else None):
                result = function()
            self.outputs = self._place_results(result, set())
            self._function = function
            self.memory = self._pool.num_bytes - before
        return self.outputs

    def replay(self) -> Any:
        if self._function is None:
            raise RuntimeError(f"{self.name} has not been recorded")
        self._next_region = 0
        with listening(self if self._breaks else None):
            result = self._function()
        if self._next_region != len(self.regions):
            raise RuntimeError(
                f"{self.name}: eager region {self.regions[self._next_region]} was recorded but did not run"
            )
        deliver(result, self.outputs, f"the output of {self.name}")
        return self.outputs

    def run_region(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = region_name(function)
        is_replay, index = self._function is not None, self._next_region
        if is_replay and (index == len(self.regions) or self.regions[index] != name):
            expected = self.regions[index] if index < len(self.regions) else "the end"
            raise RuntimeError(f"{self.name}: eager region {name} runs where {expected} was recorded")
        self._place = f"in eager region {name}"
        with listening(None):
            result = function(*args, **kwargs)
        self._place = f"after eager region {name}"
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        if not is_replay:
            self.regions.append(name)
            self._results.append(self._place_results(result, given))
            return self._results[-1]
        self._next_region += 1
        recorded = self._results[index]
        deliver(result, recorded, f"the result of eager region {name}")
        return recorded

    def _place_results(self, result: Any, given: set[int]) -> Any:
        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() in given:
                return tensor
            slot = self._pool.take(self._owner(), self._num_slots, tensor)
            self._num_slots += 1
            return slot.copy_(tensor)

        return map_tensors(place, result)


class HostPool:
    """Result buffers of recordings without a device, shared by all recordings of one owner.

    Slot ``i`` holds the ``i``-th result of whichever recording runs; recorded largest first it is allocated once.
    """

    def __init__(self) -> None:
        self._slots: weakref.WeakKeyDictionary[object, list[torch.Tensor]] = weakref.WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        return sum(slot.numel() for slots in self._slots.values() for slot in slots)

    def take(self, owner: object, slot: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor like ``like``, of undefined content, in slot number ``slot`` of ``owner``."""
        slots = self._slots.setdefault(owner, [])
        plan = torch.empty_like(like, device="meta")  # the strides of a copy: gaps and repeats are not kept
        num_bytes = extent(plan)
        with torch.inference_mode(False):
            if slot == len(slots):
                slots.append(torch.empty(num_bytes, dtype=torch.uint8))
            elif slots[slot].numel() < num_bytes:
                slots[slot] = torch.empty(num_bytes, dtype=torch.uint8)
            return slots[slot][:num_bytes].view(plan.dtype).as_strided(plan.shape, plan.stride())
