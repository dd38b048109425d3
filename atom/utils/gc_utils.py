"""Garbage collection of long-lived processes: frozen start-up heap, thresholds, a watch and a census.

A full collection walks every tracked object while the process stands still. After warm-up nearly all of
them are start-up state that is never garbage: frozen, they are not walked again.
"""

import ctypes
import gc
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from atom.utils import envs
from atom.utils.logging import init_logger

logger = init_logger(__name__)

_MADV_DONTNEED = 4


def configure_gc() -> None:
    """Apply ``ATOM_GC_THRESHOLD`` and ``ATOM_GC_DEBUG``. Called once, when a process starts."""
    thresholds = envs.ATOM_GC_THRESHOLD
    if thresholds and thresholds[0] < 1:  # 0 would turn collection off
        logger.warning("ATOM_GC_THRESHOLD=%s is ignored: the first must be at least 1", thresholds)
    elif thresholds:
        gc.set_threshold(*thresholds)
        logger.info("garbage collection thresholds are %s", gc.get_threshold())
    if envs.ATOM_GC_DEBUG and not any(isinstance(callback, _PassLog) for callback in gc.callbacks):
        gc.callbacks.append(_PassLog())


def freeze_heap() -> int:
    """Collect once, then freeze what is left, unless ``ATOM_GC_FREEZE`` is off. Returns the objects frozen."""
    if not envs.ATOM_GC_FREEZE:
        return 0
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count() - before
    logger.info("%d objects of the start-up heap are exempt from garbage collection", frozen)
    return frozen


def trim_heap() -> None:
    """Give freed memory of the start-up back to the system, where the C library can (glibc); a few milliseconds.

    Loading leaves holes behind: reading a tokenizer of 262,144 tokens 190 MB of them.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def settle_heap() -> None:
    """End a start that ran without collections: what it made stays, and is passed over from now on."""
    freeze_heap()
    gc.enable()
    trim_heap()


def release_library_code(folder: str) -> int:
    """Take the code of the shared libraries below ``folder`` out of this process's resident size (Linux).

    Importing touches far more of a library than is used afterwards. What is called again comes back from the page
    cache, sixteen pages at a time. Returns the bytes of code that were let go, resident or not.
    """
    released = 0
    with suppress(AttributeError, OSError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        with open("/proc/self/maps") as maps:
            lines = [line.split(maxsplit=5) for line in maps]
        for line in lines:
            # Code alone is as the file has it: where anything was written, the pages are the only copy.
            if len(line) == 6 and line[1] == "r-xp" and line[5].startswith(folder) and ".so" in line[5]:
                start, end = (int(address, 16) for address in line[0].split("-"))
                if madvise(start, end - start, _MADV_DONTNEED) == 0:
                    released += end - start
    return released


def unfreeze_heap() -> None:
    """Undo ``freeze_heap``, so that an engine that is closed in a living process can be collected."""
    gc.unfreeze()


class _PassLog:
    """A ``gc.callbacks`` entry that logs each pass. Counting what is tracked walks the heap: for debugging."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._since = time.perf_counter()
            return
        took_ms = (time.perf_counter() - self._since) * 1e3
        logger.info(
            "gc generation %d: %.2f ms, %d reclaimed, %d tracked",
            info["generation"],
            took_ms,
            info["collected"],
            len(gc.get_objects()),
        )


class ReclaimWatch:
    """Warns once if this process makes cyclic garbage after its start: fewer collections would then cost memory.

    Create it after ``freeze_heap``; ``check`` costs microseconds. Garbage that dies in the oldest generation is
    seen only when that is collected, which is rare.
    """

    def __init__(self) -> None:
        self._baseline = _num_collected()
        self.has_warned = False

    def check(self) -> None:
        if self.has_warned:
            return
        collected = _num_collected()
        for generation, (now, before) in enumerate(zip(collected, self._baseline, strict=True)):
            if now > before:
                self.has_warned = True
                logger.warning(
                    "garbage collection of generation %d reclaimed %d objects since the start: this process makes "
                    "reference cycles, so raising ATOM_GC_THRESHOLD would cost it memory (said once)",
                    generation,
                    now - before,
                )
                return


def _num_collected() -> list[int]:
    return [stats["collected"] for stats in gc.get_stats()]


def gc_census(top: int = 30, types_per_owner: int = 2) -> dict[str, Any]:
    """What the collector tracks, by type and by the library that defines it. Counts and type names, no contents.

    Walks every tracked object, about a second for a million: never on an event loop.

    Args:
        top: most entries of each breakdown.
        types_per_owner: most types named for an owner.
    """
    generations: dict[str, int] = {}
    types: Counter[type] = Counter()
    for generation in range(3):
        objects = gc.get_objects(generation)
        generations[str(generation)] = len(objects)
        types.update(map(type, objects))
        del objects
    owners: dict[str, Counter[str]] = {}
    for kind, count in types.items():
        owner = str(kind.__module__).split(".")[0]
        owners.setdefault(owner, Counter())[_type_name(kind)] += count
    by_owner = sorted(owners.items(), key=lambda item: -item[1].total())[:top]
    return {
        "generations": generations,
        "frozen": gc.get_freeze_count(),
        "thresholds": list(gc.get_threshold()),
        "stats": gc.get_stats(),
        "by_type": [{"type": _type_name(kind), "count": count} for kind, count in types.most_common(top)],
        "by_owner": [
            {
                "owner": owner,
                "count": names.total(),
                "types": [
                    {"type": name, "count": count} for name, count in names.most_common(types_per_owner)
                ],
            }
            for owner, names in by_owner
        ],
    }


def _type_name(kind: type) -> str:
    module = str(kind.__module__)
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
