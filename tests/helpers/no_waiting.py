"""Let a wait for the device inside of a step's launch or sampling fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from atom.model_engine.model_runner import ModelRunner


@contextmanager
def waiting_raises() -> Iterator[None]:
    """PyTorch raises RuntimeError where it would wait for the CUDA device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def steps_that_wait_raise() -> Iterator[None]:
    """``waiting_raises`` while any ModelRunner launches or samples; what reads a step may wait."""

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_without_waiting(*args: Any) -> Any:
            with waiting_raises():
                return call(*args)

        return call_without_waiting

    with pytest.MonkeyPatch.context() as patch:
        for name in ("launch", "sample"):
            patch.setattr(ModelRunner, name, checked(getattr(ModelRunner, name)))
        yield
