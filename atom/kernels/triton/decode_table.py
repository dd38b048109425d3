"""What was measured on this machine: choices of blocks by shape, kept on disk by architecture and Triton version.

``python -m atom.benchmarks.decode_chain --tune`` writes the table; serving only reads it.
"""

from __future__ import annotations

import json

import triton

from atom.errors import ConfigError
from atom.kernels.triton.decode_linear import Choice, LinearShape
from atom.utils.cache_folder import cache_root, check_private, write_aside
from atom.utils.logging import init_logger

logger = init_logger(__name__)

Table = dict[tuple[LinearShape, int], Choice]
_FOLDER = "decode_tables"


def load_table(architecture: str) -> Table:
    """The table of ``architecture`` (``sm_90``); empty where none was measured, or what is there is not one."""
    path = cache_root() / _FOLDER / _name(architecture)
    if not path.exists():
        return {}
    try:
        check_private(path.parent, must_exist=True)
        entries = json.loads(path.read_text())
        return {
            (LinearShape(int(n), int(k), int(act)), int(tokens)): Choice(str(kernel), tuple(map(int, blocks)))
            for n, k, act, tokens, kernel, blocks in entries
        }
    except (OSError, ValueError, TypeError, ConfigError) as error:
        logger.warning("the table of measured kernels %s is not used: %s", path, error)
        return {}


def save_table(architecture: str, table: Table) -> str:
    """Add ``table`` to what is on disk; returns the file's path."""
    folder = check_private(cache_root() / _FOLDER)
    merged = load_table(architecture) | table
    entries = [
        [shape.N, shape.K, shape.activation, tokens, choice.kernel, list(choice.blocks)]
        for (shape, tokens), choice in sorted(merged.items(), key=lambda item: str(item[0]))
    ]
    path = folder / _name(architecture)
    write_aside(path, json.dumps(entries, indent=0))
    return str(path)


def _name(architecture: str) -> str:
    return f"{architecture}-triton-{triton.__version__}.json"
