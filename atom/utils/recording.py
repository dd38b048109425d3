"""One recording of a forward pass: device graphs, cut where a launch depends on host data.

``GraphRecording`` holds segments: a device graph and the eager region behind it. A replay launches a graph, calls
the region with the live step's metadata, launches the next graph, and so on. What a region returns lies at the
address that the next segment was recorded reading. ``PythonRecording`` keeps the same contract without a device.

Recordings share one memory pool because they are never in use together: an output is dead at the next replay of
any of them. For that they refer to pool memory by address and do not own it (``unowned``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from atom.utils.recorded_values import deliver, map_tensors, tensors_in

# Who is told of eager regions: the recording in the making, or on the CPU the one being replayed; mostly None.
active: Recording | None = None


@contextmanager
def listening(recording: Recording | None) -> Iterator[None]:
    """Let ``recording`` hear of eager regions; with None they just run, as they do inside another region."""
    global active
    outer, active = active, recording
    try:
        yield
    finally:
        active = outer


class SegmentGraph(ABC):
    """What the device does between two eager regions. Used once: begin, end, then any number of replays."""

    @abstractmethod
    def begin(self) -> None:
        """Start to capture what this thread launches. Tensors made from now on lie in the shared pool."""

    @abstractmethod
    def end(self) -> None:
        """Stop capturing. The work need not have run yet."""

    @abstractmethod
    def abort(self) -> None:
        """Leave a capture that failed; never raises, and the device can be captured again."""

    @abstractmethod
    def replay(self) -> None:
        """Launch the captured work on the current stream."""


class GraphBackend(ABC):
    """How one kind of device records. One instance may serve many recordings."""

    @abstractmethod
    def new_graph(self) -> SegmentGraph: ...

    def session(self) -> AbstractContextManager[None]:
        """Surrounds one whole recording: stream, garbage collector."""
        return nullcontext()

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """How a recording refers to a tensor that its own segments made or read."""
        return tensor

    def hold_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """How a recording refers to a tensor it was called with: owned, unless it lies in the pool."""
        return tensor

    def note_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """These lie in the pool; a later recording may be called with them."""
        return None

    def free_memory(self) -> int:
        """Bytes free on the device; 0 where that means nothing."""
        return 0


class Recording(ABC):
    """A forward pass that can be run again without its Python. ``outputs`` die at any recording's next replay."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outputs: Any = None
        self.memory = 0  # bytes by which recording grew the pool (and the graphs themselves)
        self.regions: list[str] = []  # names, in the order in which they run

    @abstractmethod
    def record(self, function: Callable[[], Any]) -> Any:
        """Record and run ``function`` once; returns its result, owned by the caller.

        Raises RuntimeError naming the recording and the place; nothing is left half captured.
        """

    @abstractmethod
    def replay(self) -> Any:
        """Run it again on what its inputs hold now. Returns ``outputs``."""

    @abstractmethod
    def run_region(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of an eager region while ``active`` is this recording."""

    def hold_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """How the recording refers to a tensor that its function is called with."""
        return tensor

    @property
    def num_regions(self) -> int:
        return len(self.regions)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        if active is not None:
            raise RuntimeError(f"{self.name}: {active.name} is being recorded; recordings do not nest")
        try:
            yield
        except Exception as error:
            raise RuntimeError(f"recording {self.name} failed {self._place}: {error}") from error

    _place = "before its first eager region"  # how far recording has come, for its errors


def region_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


class _Region:
    """An eager region of a recording: what to call, and where its result is expected."""

    __slots__ = ("name", "function", "args", "kwargs", "recorded")

    def __init__(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.name, self.function, self.args, self.kwargs = name, function, args, kwargs
        self.recorded: Any = None

    def run(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        if result is not None or self.recorded is not None:
            deliver(result, self.recorded, f"the result of eager region {self.name}")


class GraphRecording(Recording):
    """Segments on a device. ``breaks`` False: one segment, eager regions are recorded like anything else."""

    def __init__(self, name: str, backend: GraphBackend, breaks: bool = True) -> None:
        super().__init__(name)
        self._backend = backend
        self._breaks = breaks
        self._steps: list[Callable[[], None]] = []  # graph, region, graph, ...: what a replay calls
        self._open: SegmentGraph | None = None
        # What regions returned: (recorded, live), copied before the open segment runs for the first time.
        self._due: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def num_segments(self) -> int:
        return len(self._steps) - self.num_regions

    def hold_input(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._backend.hold_input(tensor)

    def record(self, function: Callable[[], Any]) -> Any:
        with self._recording(), self._backend.session():
            free = self._backend.free_memory()
            try:
                with listening(self if self._breaks else None):
                    self._begin()
                    result = function()
                self._end()
            except BaseException:
                self._discard()
                raise
            self._backend.note_outputs(tensors_in(result))
            self.outputs = map_tensors(self._backend.hold, result)
            self.memory = max(0, free - self._backend.free_memory())
        return result

    def replay(self) -> Any:
        for step in self._steps:
            step()
        return self.outputs

    def run_region(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = region_name(function)
        self._end()
        self._place = f"in eager region {name}"
        with listening(None):
            result = function(*args, **kwargs)
        self._place = f"after eager region {name}"
        hold = self._backend.hold
        region = _Region(name, function, map_tensors(hold, args), map_tensors(hold, kwargs))
        self._steps.append(region.run)
        self.regions.append(name)
        self._begin()
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        returned = map_tensors(lambda tensor: self._place_result(tensor, given), result)
        region.recorded = map_tensors(hold, returned)
        return returned

    def _place_result(self, tensor: torch.Tensor, given: set[int]) -> torch.Tensor:
        """Where the next segment reads a region's result: itself if it is an argument, else new in the pool."""
        if tensor.untyped_storage().data_ptr() in given:
            return tensor
        placed = torch.empty_like(tensor)
        self._due.append((self._backend.hold(placed), tensor))
        return placed

    def _begin(self) -> None:
        self._open = self._backend.new_graph()
        self._open.begin()

    def _end(self) -> None:
        """End the open segment and run it: capturing computes nothing, and the next region needs real data."""
        graph = self._open
        assert graph is not None
        graph.end()
        self._open = None
        for recorded, live in self._due:
            recorded.copy_(live)
        self._due.clear()
        graph.replay()
        self._steps.append(graph.replay)

    def _discard(self) -> None:
        if self._open is not None:
            self._open.abort()
        self._open = None
        self._due.clear()
        self._steps.clear()
        self.regions.clear()
