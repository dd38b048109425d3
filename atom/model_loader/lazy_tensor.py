"""A checkpoint tensor that is read while it is being copied, in chunks of rows.

A weight loader sees an ordinary tensor: it may take its shape, narrow it and copy it into a parameter.
``parameter.copy_(lazy)`` then reads, converts and forgets a few rows at a time, so that the peak of a load
is the parameters plus a few MiB instead of the parameters plus the largest tensor. Any other operation
makes the whole tensor first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch

CHUNK_BYTES = 4 << 20  # of the finished rows: nearly cache-sized, and hides the cost of Python calls

# Runs a function over row ranges.
MapFn = Callable[[Callable[[tuple[int, int]], None], list[tuple[int, int]]], Iterable[None]]


class RowSource(ABC):
    """Where the rows of one tensor come from. ``shape[0]`` counts rows; a vector's rows are its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    map_chunks: MapFn = map  # one chunk after another; torch uses all cores within one

    @abstractmethod
    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start..stop`` as ``[stop - start, *shape[1:]]`` of ``dtype``; may share mapped memory.

        Called from several threads at once where ``map_chunks`` is a thread pool's.
        """

    def copy_rows(self, start: int, stop: int, target: torch.Tensor) -> None:
        """Rows ``start..stop`` into ``target`` of their shape, in its dtype."""
        target.copy_(self.read_rows(start, stop))

    def release(self, start: int, stop: int) -> None:  # noqa: B027  (nothing to release is the common case)
        """The rows have been copied: forget mapped pages. Reading them again stays possible."""


class LazyTensor(torch.Tensor):
    """Rows ``start..stop`` of a :class:`RowSource`, a CPU tensor to its users.

    NOTE: it intercepts calls with ``__torch_function__``. The dispatcher's ``__torch_dispatch__`` would do
    too, but its first call imports ``torch.distributed.tensor``, which takes half a second.
    """

    _source: RowSource
    _start: int
    _stop: int

    @staticmethod
    def __new__(cls, source: RowSource, start: int = 0, stop: int | None = None) -> "LazyTensor":
        stop = source.shape[0] if stop is None else stop
        shell = torch.empty((stop - start, *source.shape[1:]), dtype=source.dtype, device="meta")
        tensor = torch.Tensor._make_subclass(cls, shell)
        tensor._source, tensor._start, tensor._stop = source, start, stop
        return tensor

    def make(self) -> torch.Tensor:
        """The whole tensor as an ordinary one; shares mapped memory where the source does."""
        return self._source.read_rows(self._start, self._stop)

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy chunk by chunk into ``target`` of the same shape, converting to its dtype and device."""
        if target.shape != self.shape:
            raise ValueError(f"shape {list(self.shape)} does not fit {list(target.shape)}")
        source, first = self._source, self._start

        def copy_chunk(rows: tuple[int, int]) -> None:
            begin, end = rows
            source.copy_rows(first + begin, first + end, target[begin:end])
            source.release(first + begin, first + end)

        row_bytes = prod(source.shape[1:]) * source.dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        num_rows = self._stop - first
        chunks = [(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]
        for _ in source.map_chunks(copy_chunk, chunks):
            pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _SHELL_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:  # (a new object at each access)
            return torch.device("cpu")
        if func in _SAME_FUNCTIONS:
            return args[0]
        if func is torch.Tensor.copy_ and isinstance(args[1], LazyTensor):
            args[1].copy_to(args[0])
            return args[0]
        if func is torch.Tensor.__setitem__ and isinstance(args[2], LazyTensor):
            args[2].copy_to(args[0][args[1]])
            return None
        if func in (torch.Tensor.narrow, torch.narrow) and len(args) == 4:
            tensor, dim, start, length = args
            if dim in (0, -tensor.dim()):
                return tensor._rows(start, start + length)
            if start == 0 and length == tensor.shape[dim]:
                return tensor
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
            start, stop, _ = args[1].indices(args[0]._stop - args[0]._start)
            return args[0]._rows(start, max(start, stop))
        return func(*(_made(arg) for arg in args), **{name: _made(arg) for name, arg in kwargs.items()})

    def _rows(self, start: int, stop: int) -> "LazyTensor":
        if not 0 <= start <= stop <= self._stop - self._start:
            raise IndexError(f"rows {start}..{stop} of a tensor with {self._stop - self._start} rows")
        return LazyTensor(self._source, self._start + start, self._start + stop)

    def __repr__(self) -> str:
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype})"


def _made(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.make()
    if isinstance(value, list | tuple):
        return type(value)(_made(item) for item in value)
    return value


# Answered from shape and dtype alone.
_SHELL_FUNCTIONS = {
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.itemsize.__get__,
    torch.Tensor.nbytes.__get__,
    torch.Tensor.requires_grad.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
}
# Return the tensor itself.
_SAME_FUNCTIONS = {
    torch.Tensor.data.__get__,
    torch.Tensor.detach,
    torch.Tensor.contiguous,
    torch.Tensor.cpu,
}
