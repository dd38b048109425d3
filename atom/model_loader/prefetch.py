"""Warm the page cache while weights are being copied.

Demand faults through a mapping reach about half of what one sequential reader gets from the same disk. The
readers skip blocks that are cached already, so a warm start costs a system call a block. A failure here
costs speed only.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atom.utils import envs

Block = tuple[Path, int, int]  # file, first byte, number of bytes


@contextmanager
def prefetch(paths: Sequence[Path]) -> Iterator[None]:
    """Read ``paths`` in the background for as long as the context lasts (``ATOM_LOADER_PREFETCH*``)."""
    if not envs.ATOM_LOADER_PREFETCH:
        if envs.ATOM_LOADER_FADVISE:
            _advise(paths)
        yield
        return
    blocks = _blocks(paths, envs.ATOM_LOADER_PREFETCH_BLOCK_MB << 20)
    stop = threading.Event()
    lock = threading.Lock()

    def read_blocks() -> None:
        while not stop.is_set():
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            try:
                _read_block(*block)
            except OSError:
                return

    num_threads = max(1, envs.ATOM_LOADER_PREFETCH_THREADS)
    threads = [
        threading.Thread(target=read_blocks, name="atom-prefetch", daemon=True) for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _blocks(paths: Sequence[Path], block_bytes: int) -> Iterator[Block]:
    for path in paths:
        size = path.stat().st_size
        for start in range(0, size, block_bytes):
            yield path, start, min(block_bytes, size - start)


def _read_block(path: Path, start: int, num_bytes: int) -> None:
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        if _is_cached(fd, start) and _is_cached(fd, start + num_bytes - 1):
            return
        buffer = bytearray(1 << 20)
        for offset in range(start, start + num_bytes, len(buffer)):
            os.preadv(fd, [buffer], offset)


def _is_cached(fd: int, offset: int) -> bool:
    """Whether a read at ``offset`` would not wait for the disk; False where the system cannot tell."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False


def _advise(paths: Sequence[Path]) -> None:
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
