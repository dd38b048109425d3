"""The tensors that a recording is called with, hands to its regions and returns: found, referred to, delivered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor inside tuples, lists and dicts replaced by ``function`` of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_tensors(function, item) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements by address; the memory may be freed and used again while this lives."""
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    with torch.inference_mode(False):  # so that it may be written in and outside of inference mode
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())


def deliver(live: Any, recorded: Any, what: str) -> None:
    """Copy the tensors of ``live`` into those of ``recorded`` wherever they lie at another address.

    Raises RuntimeError, naming ``what``, when structure, shape or a plain value differs: that was baked in.
    """
    if live is recorded:
        return
    if isinstance(recorded, torch.Tensor):
        if not isinstance(live, torch.Tensor) or live.shape != recorded.shape:
            raise RuntimeError(f"{what} was recorded as {_describe(recorded)}, got {_describe(live)}")
        if live.data_ptr() != recorded.data_ptr():
            recorded.copy_(live.clone() if _overlap(live, recorded) else live)
    elif isinstance(recorded, (tuple, list)):
        if not isinstance(live, (tuple, list)) or len(live) != len(recorded):
            raise RuntimeError(f"{what} was recorded as {_describe(recorded)}, got {_describe(live)}")
        for index, place in enumerate(recorded):
            if live[index] is not place:
                deliver(live[index], place, f"{what}[{index}]")
    elif isinstance(recorded, dict):
        if not isinstance(live, dict) or live.keys() != recorded.keys():
            raise RuntimeError(f"{what} was recorded as {_describe(recorded)}, got {_describe(live)}")
        for key, place in recorded.items():
            deliver(live[key], place, f"{what}[{key!r}]")
    elif live != recorded:
        raise RuntimeError(f"{what} was recorded as {_describe(recorded)}, got {_describe(live)}")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + extent(other) and begin < start + extent(one)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to behind the last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return f"dict of {sorted(map(str, value))}"
    return repr(value)
