"""Folders below ``~/.cache/atom`` that only this user can have filled."""

import os
import stat
import tempfile
from pathlib import Path

from atom.errors import ConfigError


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/atom``, by default ``~/.cache/atom``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "atom"


def private_cache_folder(name: str) -> Path:
    """The folder ``name`` of the cache, made with mode 0700 if it is absent.

    Raises:
        ConfigError: it belongs to somebody else, or others may write into it: what it holds is not trusted.
    """
    return check_private(cache_root() / name)


def check_private(folder: Path, *, must_exist: bool = False) -> Path:
    """``folder``, made with mode 0700 if it is absent. Raises ConfigError as ``private_cache_folder`` does."""
    try:
        if not must_exist:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the cache folder {folder}: {error.strerror or error}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the cache folder {folder} is not a folder of its own (a link?)")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the cache folder {folder} belongs to user id {status.st_uid}, not to {os.geteuid()}"
        )
    if status.st_mode & 0o022:
        raise ConfigError(
            f"the cache folder {folder} can be written by others (mode {stat.S_IMODE(status.st_mode):o}); "
            "make it 0700"
        )
    return folder


def write_aside(path: Path, content: str | bytes) -> None:
    """Write aside, then rename: a reader never sees half a file. Raises OSError, and then leaves nothing behind."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    is_whole = False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(aside, path)
        is_whole = True
    finally:
        if not is_whole:
            os.unlink(aside)
