"""What was measured on this machine: choices of blocks by shape, kept on disk by architecture and Triton version.

``python -m atom.benchmarks.decode_tune`` writes the table; serving only reads it. Kernels change and files
stay: a table with a choice that does not serve its layer today is not used.
"""

from __future__ import annotations

from pathlib import Path

import triton

from atom.kernels.triton.decode_choices import BATCH_CLASSES, CLASSES, Choice, LinearShape, fits
from atom.kernels.triton.measured_table import Rows, read_rows, table_path, write_rows

Table = dict[tuple[LinearShape, int], Choice]


def load_table(architecture: str) -> Table:
    """The table of ``architecture`` (``sm_90``); empty where none was measured, or what is there is not one."""
    return read_rows(_path(architecture), _parse)


def save_table(architecture: str, table: Table) -> str:
    """Add ``table`` to what is on disk; returns the file's path."""
    merged = load_table(architecture) | table
    rows = [
        [shape.N, shape.K, shape.activation, tokens, choice.kernel, list(choice.blocks)]
        for (shape, tokens), choice in sorted(merged.items(), key=lambda item: str(item[0]))
    ]
    return write_rows(_path(architecture), rows)


def _parse(rows: Rows) -> Table:
    table: Table = {}
    for n, k, act, tokens, kernel, blocks in rows:
        shape, choice = LinearShape(int(n), int(k), int(act)), Choice(str(kernel), tuple(map(int, blocks)))
        if tokens not in CLASSES + BATCH_CLASSES or not fits(choice, shape, tokens):
            raise ValueError(f"{choice} does not serve {shape} and {tokens} tokens")
        table[shape, tokens] = choice
    return table


def _path(architecture: str) -> Path:
    return table_path("decode_tables", architecture, triton=triton.__version__)
