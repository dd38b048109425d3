"""Bytecode of imported packages, kept where their own folders have none.

Container images are often built without bytecode (``PYTHONDONTWRITEBYTECODE``), or mounted read-only. Python then
compiles every module at every start: for torch and its compiler 1,500 of them, six seconds.
"""

import importlib.util
import os
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

from atom.errors import ConfigError
from atom.utils import envs
from atom.utils.cache_folder import private_cache_folder

KIND = "bytecode"


def keep_bytecode(package: str = "torch") -> bool:
    """Let this process keep bytecode below ``~/.cache/atom`` if nobody keeps that of ``package``.

    Call it before what is large is imported. Returns whether it changed anything: not where bytecode is found beside
    the sources or can be written there, where a prefix is set already, or with ``ATOM_BYTECODE_CACHE=0``.
    """
    if sys.pycache_prefix is not None or not envs.ATOM_BYTECODE_CACHE or _is_kept(package):
        return False
    try:
        folder = private_cache_folder(KIND)
    except ConfigError:  # it only costs time
        return False
    sys.pycache_prefix = str(folder / sys.implementation.cache_tag)
    sys.dont_write_bytecode = False
    return True


def _is_kept(package: str) -> bool:
    spec: ModuleSpec | None = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return True  # nothing that could be kept
    bytecode = Path(importlib.util.cache_from_source(spec.origin))
    if bytecode.exists():
        return True
    return not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
