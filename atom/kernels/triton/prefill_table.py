"""What was measured on this machine: which kernel is fastest at prefill attention, by layer and longest prompt.

``python -m atom.benchmarks.gpu_kernels --parts varlen --keep`` writes the table, by architecture and by the versions of
Triton and PyTorch; serving only reads it. What it does not name follows the rules of ``varlen_attention``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import triton

from atom.kernels.triton.measured_table import Rows, read_rows, table_path, write_rows
from atom.kernels.triton.varlen_attention import TileShape
from atom.platforms import PLATFORMS, Platform

TORCH: Literal["torch"] = "torch"  # ``torch.nn.attention.varlen``, for prompts of which nothing is cached

Choice = TileShape | Literal["torch"]


class PrefillLayer(NamedTuple):
    """A layer of 16-bit numbers without window and soft cap."""

    head_dim: int
    group: int  # query heads of a kv head


Choices = Mapping[int, Choice]  # tokens of the longest prompt of a step -> what was the fastest there
Table = dict[PrefillLayer, dict[int, Choice]]


def choose(choices: Choices, longest: int) -> Choice | None:
    """What serves steps whose longest prompt has ``longest`` tokens: as the longest that was measured up to there.

    None: nothing so short was measured.
    """
    size = max((size for size in choices if size <= longest), default=None)
    return None if size is None else choices[size]


@cache
def measured_on(platform: str) -> Table:
    """The table of the device of ``platform`` (``cuda``); empty where there is no device, or nothing was measured.

    Read once a process: all layers and steps go by the same one.
    """
    kind = PLATFORMS[platform]("measured kernels")
    return load_table(kind.describe().get("architecture", "")) if kind.is_available() else {}


def measured_choices(platform: Platform, layer: PrefillLayer) -> Choices:
    """What was measured of such layers on the device of ``platform``."""
    return measured_on(platform.name).get(layer, {})


def load_table(architecture: str) -> Table:
    """The table of ``architecture`` (``sm_90``); empty where none was measured, or what is there is not one."""
    return read_rows(_path(architecture), _parse)


def save_table(architecture: str, table: Table) -> str:
    """Add ``table`` to what is on disk; returns the file's path."""
    merged = {layer: dict(choices) for layer, choices in load_table(architecture).items()}
    for layer, choices in table.items():
        merged.setdefault(layer, {}).update(choices)
    rows = [
        [*layer, longest, choice]
        for layer, choices in sorted(merged.items())
        for longest, choice in sorted(choices.items())
    ]
    return write_rows(_path(architecture), rows)


def _parse(rows: Rows) -> Table:
    table: Table = {}
    for head_dim, group, longest, choice in rows:
        layer = PrefillLayer(int(head_dim), int(group))
        table.setdefault(layer, {})[int(longest)] = _parse_choice(choice)
    return table


def _parse_choice(choice: object) -> Choice:
    if choice == TORCH:
        return TORCH
    *sizes, uses_descriptors, is_gluon = choice
    rows, keys, num_warps, num_stages = map(int, sizes)
    return TileShape(rows, keys, num_warps, num_stages, bool(uses_descriptors), bool(is_gluon))


def _path(architecture: str) -> Path:
    return table_path("prefill_tables", architecture, triton=triton.__version__, torch=torch.__version__)
