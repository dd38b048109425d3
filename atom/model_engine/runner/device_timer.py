"""How long forward passes take on the device (``ATOM_ENABLE_METRICS_DEVICE_TIMER``), without waiting for it."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from atom.runtime.histogram import Histogram
from atom.utils import envs

MAX_PENDING = 256
BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


def _do_nothing() -> None:
    return None


class NoTimer:
    """What stands in for a timer that nobody asked for."""

    def start(self, name: str) -> Callable[[], None]:
        return _do_nothing

    def values(self) -> dict[str, float]:
        return {}


class DeviceTimer(NoTimer):
    """Times named spans: with device events where there are any, else by the wall clock.

    Device work is asynchronous: a span is a pair of events, read once both have passed. Pairs are looked at in
    order, up to the first that has not; at most ``MAX_PENDING`` wait, further spans are not timed.

    Args:
        names: the histograms, by the names of ``/metrics``.
    """

    def __init__(self, device: torch.device, *names: str):
        self._has_events = device.type != "cpu"
        self._histograms = {name: Histogram(BOUNDS) for name in names}
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self._spare: list[Any] = []

    def start(self, name: str) -> Callable[[], None]:
        """Begin a span of the device work launched from now on; the function returned ends it."""
        return self._start_events(name) if self._has_events else self._start_clock(name)

    def _start_clock(self, name: str) -> Callable[[], None]:
        began = time.perf_counter()
        return lambda: self._histograms[name].observe(time.perf_counter() - began)

    def _start_events(self, name: str) -> Callable[[], None]:
        self._poll()
        if len(self._pending) >= MAX_PENDING:
            return _do_nothing
        start, end = self._event(), self._event()

        def stop() -> None:
            end.record()
            self._pending.append((name, start, end))

        start.record()
        return stop

    def values(self) -> dict[str, float]:
        """Everything measured so far in the flat form of ``Histogram.flatten``."""
        self._poll()
        flat: dict[str, float] = {}
        for name, histogram in self._histograms.items():
            flat |= histogram.flatten(name)
        return flat

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)

    def _poll(self) -> None:
        while self._pending and self._pending[0][2].query():
            name, start, end = self._pending.popleft()
            self._histograms[name].observe(start.elapsed_time(end) / 1e3)
            self._spare += (start, end)


def make_device_timer(device: torch.device, *names: str) -> NoTimer:
    """A timer of the named spans, if the environment asks for one."""
    return DeviceTimer(device, *names) if envs.ATOM_ENABLE_METRICS_DEVICE_TIMER else NoTimer()
