"""The cache of compiled graphs on disk: nothing in it is trusted that was not checked, and nothing has to be deleted.

    ~/.cache/atom/torch_compile_cache/<hash>/entry.json       what the entry is for; its mtime is the last use
    .../<hash>/rank_<i>/<prefix>/vllm_compile_cache.py        which artifact belongs to which piece
    .../<hash>/rank_<i>/<prefix>/<artifact>/                  files, with a manifest of sizes and SHA-256
    .../<hash>/rank_<i>/<prefix>/work-<random>/               scratch of one process

The hash covers the configuration, every source file that was traced, the compiler and the machine
(:func:`cache_hash`). An artifact besides names the graph that it was made from. Loading one runs code, so the
folders must be this user's own. No torch.
"""

import ast
import fcntl
import hashlib
import json
import logging
import os
import pprint
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from atom import __version__
from atom.errors import ConfigError
from atom.utils.cache_folder import check_private, private_cache_folder, write_aside

logger = logging.getLogger(__name__)

FORMAT = 1  # of everything below a hash; another number is another hash
KIND = "torch_compile_cache"
INDEX = "vllm_compile_cache.py"
MANIFEST = "manifest.json"
ENTRY = "entry.json"
_KEY = re.compile(r"[A-Za-z0-9_]{1,100}")
_IGNORED = ("locks", "__pycache__")  # torch's own traces, no part of an artifact

Index = dict[
    tuple[int | None, int, str], Any
]  # (runtime shape, graph index, compiler) -> the compiler's handle


@dataclass
class CompilationCounter:
    """What compilation has done in this process."""

    num_graphs_seen: int = 0  # graphs that Dynamo handed over
    num_pieces: int = 0  # of them, after splitting, those to compile
    num_compiled: int = 0  # compiler runs
    num_loaded: int = 0  # artifacts taken from disk
    num_shared: int = 0  # pieces served by the code of an identical one
    num_rejected: int = 0  # artifacts that were there and not trusted
    num_saved: int = 0  # artifacts written
    num_planned: int = 0  # kinds of call that a plan served without tracing
    num_plans_saved: int = 0  # plans written

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)


compilation_counter = CompilationCounter()


class StaleArtifact(Exception):
    """An artifact is absent, damaged, or was made from something else."""


def compile_cache_root(cache_dir: str = "") -> Path:
    """The folder of all hashes: ``cache_dir``, by default below ``~/.cache/atom``.

    Raises:
        ConfigError: it cannot be made, or others can write to it.
    """
    return check_private(Path(cache_dir).expanduser()) if cache_dir else private_cache_folder(KIND)


def cache_hash(config_hash: str, traced_files: Iterable[str], compiler_hash: str) -> str:
    """Ten hex digits over the configuration, path and contents of the traced sources, and the compiler."""
    digest = hashlib.sha256(f"{FORMAT}\0{__version__}\0{config_hash}\0{compiler_hash}".encode())
    for path in sorted(set(traced_files)):
        with suppress(OSError):  # code made at run time has no file
            content = Path(path).read_bytes()
            digest.update(f"\0{path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:10]


def record_entry(folder: Path, facts: dict[str, Any]) -> None:
    """Say in ``folder``, that of a hash, what it is for and that it is in use now."""
    path = folder / ENTRY
    with suppress(FileNotFoundError):
        os.utime(path)
        return
    write_aside(path, json.dumps({**facts, "created": time.time()}, indent=2) + "\n")


class ArtifactFolder:
    """The artifacts of one compiled module on one rank. Every method that writes is called under ``lock``."""

    def __init__(self, path: Path):
        self.path = check_private(path)
        self._work: Path | None = None
        self._work_lock: int | None = None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; released when this one dies. A file system without locks is used without."""
        check_private(self.path)  # made again if the cache was cleared
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("Another process compiles for %s: waiting for its artifact", self.path)
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:
                logger.warning("The compile cache %s is used without a lock: %s", self.path, error)
            yield
        finally:
            os.close(handle)

    def read_index(self) -> Index:
        """What the index says; empty if it is absent or damaged."""
        path = self.path / INDEX
        try:
            found = ast.literal_eval(path.read_text())
            if not isinstance(found, dict) or not all(isinstance(k, tuple) and len(k) == 3 for k in found):
                raise ValueError("it is no table of artifacts")
            return found
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, SyntaxError, MemoryError, RecursionError) as error:
            logger.warning("Compiling again, the index %s is damaged: %s", path, error)
            return {}

    def write_index(self, index: Index) -> None:
        write_aside(self.path / INDEX, pprint.pformat(index) + "\n")

    def publish(self, key: str, source: str, fill: Callable[[Path], None]) -> Path:
        """Let ``fill`` make an artifact in a new folder, and put that where ``find`` looks for ``key``.

        Args:
            source: fingerprint of the graph it was made from.
        """
        self._check_key(key)
        aside = Path(tempfile.mkdtemp(dir=self.path, prefix=f".{key}-"))
        try:
            fill(aside)
            manifest = {"format": FORMAT, "source": source, "files": _digests(aside)}
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            final = self.path / key
            if final.is_symlink() or final.is_file():
                final.unlink()
            elif final.exists():
                shutil.rmtree(final)
            aside.rename(final)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return final

    def find(self, key: str, source: str) -> Path:
        """The folder of artifact ``key``, checked. Raises StaleArtifact, saying why it is not to be used."""
        self._check_key(key)
        path = self.path / key
        try:
            check_private(path, must_exist=True)
            manifest = json.loads((path / MANIFEST).read_text())
            expected = manifest["files"] if manifest["format"] == FORMAT else None
            if manifest["source"] != source:
                raise StaleArtifact("it was made from another graph")
            found = _digests(path)
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise StaleArtifact(f"it cannot be read ({error})") from error
        if expected != found:
            names = {*(expected or {}), *found}
            odd = sorted(name for name in names if (expected or {}).get(name) != found.get(name))
            raise StaleArtifact(f"its files are not those that were written ({', '.join(odd[:3])})")
        return path

    @staticmethod
    def _check_key(key: str) -> None:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise StaleArtifact(f"{key!r} is no name of an artifact")

    def work_folder(self) -> Path:
        """Scratch space of this process, gone with it. What dead processes left is swept first."""
        if self._work is None or not self._work.is_dir():
            for left in self.path.glob("work-*"):
                if not _is_locked(left / ".lock"):
                    shutil.rmtree(left, ignore_errors=True)
            self._work = Path(tempfile.mkdtemp(dir=self.path, prefix="work-"))
            self._work_lock = os.open(self._work / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with suppress(OSError):
                fcntl.flock(self._work_lock, fcntl.LOCK_EX)
        return self._work

    def close(self) -> None:
        """Remove the scratch space."""
        if self._work_lock is not None:
            os.close(self._work_lock)
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = self._work_lock = None


def _is_locked(path: Path) -> bool:
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _digests(folder: Path) -> dict[str, list[Any]]:
    """``relative path -> [bytes, SHA-256]`` of every file but the manifest and what loading leaves behind."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] in _IGNORED or "__pycache__" in name.parts or name.parts == (MANIFEST,):
            continue
        if path.is_symlink():
            raise ValueError(f"{name} is a link")
        if path.is_file():
            content = path.read_bytes()
            found[name.as_posix()] = [len(content), hashlib.sha256(content).hexdigest()]
    return found
