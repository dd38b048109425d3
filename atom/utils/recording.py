"""One recording of a forward pass: device graphs, cut where a launch depends on host data.

``GraphRecording`` holds segments: a device graph and the eager region behind it. A replay launches a graph, calls
the region with the live step's metadata, launches the next graph, and so on. What a region returns lies at the
address that the next segment was recorded reading. ``PythonRecording`` is the same contract without a device:
the function runs again and its regions must come in the recorded order.

Recordings share one memory pool because they are never in use together: an output is dead at the next replay of
any of them. For that they refer to pool memory by address and do not own it (``unowned``).
"""

from __future__ import annotations

import gc
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from atom.distributed.nccl_watchdog import drain_nccl_works
from atom.platforms import platform_of_device
from atom.utils.logging import init_logger

logger = init_logger(__name__)

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
    return start < begin + _extent(other) and begin < start + _extent(one)


def _extent(tensor: torch.Tensor) -> int:
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
        """Surrounds one whole recording: stream, garbage collector, watchdog."""
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
        self._due: list[tuple[torch.Tensor, torch.Tensor]] = (
            []
        )  # (recorded, live) before the open segment runs

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
        num_bytes = _extent(plan)
        with torch.inference_mode(False):
            if slot == len(slots):
                slots.append(torch.empty(num_bytes, dtype=torch.uint8))
            elif slots[slot].numel() < num_bytes:
                slots[slot] = torch.empty(num_bytes, dtype=torch.uint8)
            return slots[slot][:num_bytes].view(plan.dtype).as_strided(plan.shape, plan.stride())


class CudaGraph(SegmentGraph):
    """A CUDA or HIP graph whose tensors lie in ``pool``."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._is_empty = False

    def begin(self) -> None:
        # thread_local: what other threads of this process ask of the device does not spoil the capture
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        # torch warns of a segment without work, as between two regions in a row; such a segment is not launched
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._graph.capture_end()
        for warning in caught:
            if "Graph is empty" in str(warning.message):
                self._is_empty = True
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def abort(self) -> None:
        if not _attempt(self.end):
            # An invalidated capture: torch gave up before it handed back allocation and the random generator.
            _attempt(lambda: torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool))
            spare = CudaGraph(self._pool)
            if _attempt(spare.begin):
                _attempt(spare.end)
        _attempt(self._graph.reset)

    def replay(self) -> None:
        if not self._is_empty:
            self._graph.replay()


def _attempt(action: Callable[[], Any]) -> bool:
    """Whether ``action`` succeeded; for cleaning up behind an error that is about to be raised."""
    try:
        action()
    except Exception as error:
        logger.debug("leaving a failed capture: %s", error)
        return False
    return True


class CudaBackend(GraphBackend):
    """Records on a stream of its own, into the process's one pool."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.device = device
        self._pool = pool
        self._stream = torch.cuda.Stream(device)
        self._platform = platform_of_device(device)
        self._pool_addresses: set[int] = set()  # of storages that recordings returned

    def new_graph(self) -> SegmentGraph:
        return CudaGraph(self._pool)

    @contextmanager
    def session(self) -> Iterator[None]:
        drain_nccl_works()
        torch.cuda.synchronize(self.device)
        caller = torch.cuda.current_stream(self.device)
        collects = gc.isenabled()
        gc.disable()  # a finaliser that touches the device would spoil the capture
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if collects:
                gc.enable()
            caller.wait_stream(self._stream)

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        # NOTE: also for tensors from outside the pool (weights, caches, step buffers): a device graph that reads
        # them relies on their owner in the same way.
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return unowned(tensor) if plain and tensor.device.type == "cuda" and tensor.numel() else tensor

    def hold_input(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        return self.hold(tensor) if address in self._pool_addresses else tensor

    def note_outputs(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pool_addresses.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def free_memory(self) -> int:
        return self._platform.free_memory(self.device.index or 0)
