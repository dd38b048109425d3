"""CUDA and HIP graphs as the segments of a recording, captured on a stream of their own into one pool."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from atom.distributed.nccl_watchdog import drain_nccl_works
from atom.platforms import platform_of_device
from atom.utils.logging import init_logger
from atom.utils.recorded_values import unowned
from atom.utils.recording import GraphBackend, SegmentGraph

logger = init_logger(__name__)


class CudaGraph(SegmentGraph):
    """A CUDA or HIP graph whose tensors lie in ``pool``.

    Args:
        on_void: called when the device has voided the capture: torch then never gets to close its books on the
            pool, so that nothing can be captured into it any more.
    """

    def __init__(self, pool: Any, on_void: Callable[[], None] = lambda: None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._on_void = on_void
        self._is_empty = False

    def begin(self) -> None:
        drain_nccl_works()  # before each segment: a region may have launched eager collectives
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
            # A voided capture: torch gave up before it handed back allocation and the random generator. A capture
            # that succeeds, into a pool of its own, takes the generator back.
            _attempt(lambda: torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool))
            spare = CudaGraph(torch.cuda.graph_pool_handle())
            if _attempt(spare.begin):
                _attempt(spare.end)
            self._on_void()
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
    """Records on a stream of its own, into the process's one pool.

    Args:
        new_pool: makes another pool the process's one, once the present one cannot be used any more.
    """

    def __init__(self, device: torch.device, pool: Any, new_pool: Callable[[], Any]) -> None:
        self.device = device
        self._pool = pool
        self._new_pool = new_pool
        self._stream = torch.cuda.Stream(device)
        self._platform = platform_of_device(device)
        self._pool_addresses: set[int] = set()  # of storages that recordings returned
        self._anchor = self._record_anchor()

    def _record_anchor(self) -> CudaGraph:
        """A graph that is never replayed: a pool is gone, and its handle with it, once its last graph is."""
        anchor = CudaGraph(self._pool)
        with self.session():
            value = torch.zeros(1, device=self.device)
            anchor.begin()
            value.add_(1)
            anchor.end()
        return anchor

    def new_graph(self) -> SegmentGraph:
        return CudaGraph(self._pool, self._renew_pool)

    def _renew_pool(self) -> None:
        self._pool = self._new_pool()
        _attempt(self._renew_anchor)

    def _renew_anchor(self) -> None:
        self._anchor = self._record_anchor()

    @contextmanager
    def session(self) -> Iterator[None]:
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
