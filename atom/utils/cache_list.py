"""What ATOM keeps below ``~/.cache/atom``, for ``atom cache``. No torch."""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atom.errors import ConfigError
from atom.utils.cache_folder import cache_root
from atom.utils.compile_cache import ENTRY, KIND

_AGE = re.compile(r"(\d+)\s*([smhdw]?)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "": 86400}


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One thing that can be removed by itself. Times are Unix times."""

    kind: str  # folder below the cache: torch_compile_cache, tokenizers, models, bench ...
    name: str  # the hash of a compile cache, else the file's name
    model: str  # what the compile cache is for; empty elsewhere
    num_bytes: int
    created: float
    last_used: float
    path: Path

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def list_entries() -> list[CacheEntry]:
    """Everything that is kept, by kind and then by last use, the latest first."""
    root = cache_root()
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    entries = [_entry(path) for folder in folders for path in folder.iterdir() if path.name[0] != "."]
    return sorted(entries, key=lambda entry: (entry.kind, -entry.last_used))


def _entry(path: Path) -> CacheEntry:
    files = [p for p in path.rglob("*") if p.is_file() and not p.is_symlink()] if path.is_dir() else [path]
    unique = {(status.st_dev, status.st_ino): status for status in map(os.lstat, files)}  # hard links once
    status = path.lstat()
    created, last_used, model = status.st_mtime, max(status.st_atime, status.st_mtime), ""
    if path.parent.name == KIND:
        try:
            facts = json.loads((path / ENTRY).read_text())
            model, created = str(facts["model"]), float(facts["created"])
            last_used = (path / ENTRY).stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            model = "?"
    size = sum(status.st_size for status in unique.values())
    return CacheEntry(path.parent.name, path.name, model, size, created, last_used, path)


def remove(entries: Iterable[CacheEntry]) -> int:
    """Delete them; the bytes that were freed. An engine that uses one goes on with what it has loaded."""
    freed = 0
    for entry in entries:
        aside = Path(tempfile.mkdtemp(dir=entry.path.parent, prefix=".removed-"))
        try:
            # Plans of compiled calls lie beside their artifacts, named after them.
            plans = entry.path.parent.glob(f".plans/{entry.name}-*") if entry.kind == KIND else ()
            for plan in plans:
                plan.unlink(missing_ok=True)
            entry.path.rename(aside / entry.name)  # others see all of it or nothing
            freed += entry.num_bytes
        except FileNotFoundError:
            pass
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return freed


def parse_age(text: str) -> float:
    """Seconds of ``30d``, ``12h``, ``45m``, ``90s``, ``2w``; a bare number is days. Raises ConfigError."""
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(f"--older-than must be an age such as 30d, 12h or 45m, got {text!r}")
    return int(match[1]) * _SECONDS[match[2]]


def unused_for(entries: Iterable[CacheEntry], seconds: float) -> list[CacheEntry]:
    return [entry for entry in entries if time.time() - entry.last_used >= seconds]


def render(entries: Iterable[CacheEntry]) -> str:
    """A table for people."""
    now = time.time()
    rows = [("KIND", "NAME", "MODEL", "SIZE", "AGE", "LAST USE")]
    for entry in entries:
        age, idle = _ago(now - entry.created), _ago(now - entry.last_used)
        rows.append((entry.kind, entry.name, entry.model, format_size(entry.num_bytes), age, idle))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def format_size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _ago(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds // _SECONDS[unit]:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"
