"""Bytes of a weight file as tensors: mapped, or read with plain reads where mapping misbehaves."""

import mmap
import os
from abc import ABC, abstractmethod
from math import prod
from pathlib import Path

import numpy as np
import torch

from atom.errors import ModelLoadError
from atom.model_loader.checkpoint import TensorInfo
from atom.model_loader.lazy_tensor import RowSource

# Without it a mapping larger than the free memory could be refused, although it never holds much of it.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class WeightFile(ABC):
    """Random access to the bytes of one file. Safe to use from several threads."""

    @abstractmethod
    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """``num_bytes`` of the file as uint8 [num_bytes]; not to be written."""

    @abstractmethod
    def release(self, offset: int, num_bytes: int) -> None:
        """The bytes are not needed for now. Tensors over them stay valid."""


class MappedFile(WeightFile):
    """A private mapping; it lives as long as a tensor over it does.

    Pages that have been copied are dropped at once: the kernel keeps the file in its cache, but they no
    longer count as this process's memory.
    """

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            self._map = mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,  # torch warns about read-only memory
            )

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=offset)

    def release(self, offset: int, num_bytes: int) -> None:
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = offset + num_bytes - start
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, start, length)


class PlainFile(WeightFile):
    """Plain positioned reads into fresh memory (``ATOM_DISABLE_MMAP``)."""

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (open as long as the object lives)

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        # numpy's memory: torch aligns its own, and such blocks fragment the heap by a multiple of their size.
        buffer = np.empty(num_bytes, dtype=np.uint8)
        view = memoryview(buffer)
        done = 0
        while done < num_bytes:
            count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise ModelLoadError(
                    f"{self._path} ended at byte {offset + done}, {num_bytes - done} bytes early"
                )
            done += count
        return torch.from_numpy(buffer)

    def release(self, offset: int, num_bytes: int) -> None:
        """Nothing is kept."""


def open_weight_file(path: Path, use_mmap: bool = True) -> WeightFile:
    try:
        return MappedFile(path) if use_mmap else PlainFile(path)
    except OSError as error:
        raise ModelLoadError(f"cannot open {path}: {error.strerror or error}") from error


class StoredRows(RowSource):
    """Rows of a tensor that is stored in a torch dtype; a scalar is one row."""

    def __init__(self, file: WeightFile, info: TensorInfo):
        self._file = file
        self._offset = info.offset
        self.shape = info.shape
        self.dtype = getattr(torch, info.dtype)
        self._row_bytes = prod(info.shape[1:]) * self.dtype.itemsize

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        raw = self._file.bytes_at(self._offset + start * self._row_bytes, (stop - start) * self._row_bytes)
        return raw.view(self.dtype).view(stop - start, *self.shape[1:])

    def release(self, start: int, stop: int) -> None:
        self._file.release(self._offset + start * self._row_bytes, (stop - start) * self._row_bytes)
