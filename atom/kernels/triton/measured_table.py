"""Files of what was measured on this machine: one for an architecture and the versions that the figures depend on.

A file is a list of rows in JSON, below a folder that only this user can have filled. What is no such list, or holds
other rows than its reader knows, is said in the log and not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from atom.errors import ConfigError
from atom.utils.cache_folder import cache_root, check_private, write_aside
from atom.utils.logging import init_logger

logger = init_logger(__name__)

Rows = list[list[Any]]
T = TypeVar("T")


def table_path(folder: str, architecture: str, **versions: str) -> Path:
    """Where the table of ``architecture`` (``sm_90``) lies in ``folder`` of the cache; versions by their names."""
    parts = [architecture, *(f"{name}-{version}" for name, version in versions.items())]
    return cache_root() / folder / f"{'-'.join(parts)}.json"


def read_rows(path: Path, parse: Callable[[Rows], T]) -> T:
    """What ``parse`` makes of the file's rows; of none where there is no file, or what is there is not trusted.

    ``parse`` raises ValueError or TypeError of what it does not know.
    """
    if not path.exists():
        return parse([])
    try:
        check_private(path.parent, must_exist=True)
        return parse(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, ConfigError) as error:
        logger.warning("the table of measured kernels %s is not used: %s", path, error)
        return parse([])


def write_rows(path: Path, rows: Rows) -> str:
    """Replace the file; returns its path. Raises ConfigError: others may write into its folder; OSError."""
    check_private(path.parent)
    write_aside(path, json.dumps(rows))
    return str(path)
