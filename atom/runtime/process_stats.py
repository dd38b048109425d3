"""CPU time and threads of this process and its children, from the kernel's records. Empty where it keeps none."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStats:
    """``user_s`` and ``system_s`` are CPU seconds since the process began."""

    name: str
    pid: int
    user_s: float
    system_s: float
    num_threads: int


def process_tree(name: str) -> list[ProcessStats]:
    """This process, called ``name``, and everything below it."""
    own = os.getpid()
    found = []
    for pid in (own, *_descendants(own)):
        stats = _read(pid, name if pid == own else _title(pid))
        if stats is not None:
            found.append(stats)
    return found


def _descendants(pid: int) -> Iterator[int]:
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _read(pid: int, name: str) -> ProcessStats | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None  # it has ended
    user, system = int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S
    return ProcessStats(name, pid, user, system, int(fields[17]))


def _title(pid: int) -> str:
    """``EngineCore`` of a process that is titled ``ATOM::EngineCore``; else the module it runs."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "unknown"
    text = words[words.index(b"-m") + 1] if b"-m" in words[:-1] else words[0]
    return text.decode("utf-8", "replace").strip().split("::")[-1].split(".")[-1][:64] or "unknown"
