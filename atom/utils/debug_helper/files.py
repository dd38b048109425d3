"""The files of the dumps: how they are called, and reading and writing them.

A file holds tensors, numbers, text, lists and dictionaries, which ``torch.load(weights_only=True)`` reads without
running code.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atom.errors import AtomError, ConfigError

_FORWARD_NAME = re.compile(r"layer(\d+)_(.+)_rank(\d+)(?:_call(\d+))?\.pt")
_WEIGHT_NAME = re.compile(r"weight_rank(\d+)_layer(\d+)\.pt")


class DumpFileError(AtomError):
    """A dump is missing, or is not a file of tensors."""


@dataclass(frozen=True, order=True)
class DumpName:
    """What the name of a dump says. ``label`` is empty for weights; ``call`` is None where only one is dumped."""

    layer: int
    label: str  # class name, and the module's own name where a layer has several of the class
    rank: int
    call: int | None = None

    @property
    def is_weights(self) -> bool:
        return not self.label

    @property
    def file_name(self) -> str:
        if self.is_weights:
            return f"weight_rank{self.rank}_layer{self.layer}.pt"
        call = "" if self.call is None else f"_call{self.call:03d}"
        return f"layer{self.layer:02d}_{self.label}_rank{self.rank}{call}.pt"

    @classmethod
    def parse(cls, file_name: str) -> "DumpName | None":
        """The parts of ``file_name``; None when it is no dump."""
        if match := _FORWARD_NAME.fullmatch(file_name):
            layer, label, rank, call = match.groups()
            return cls(int(layer), label, int(rank), None if call is None else int(call))
        if match := _WEIGHT_NAME.fullmatch(file_name):
            return cls(int(match[2]), "", int(match[1]))
        return None


def make_folder(path: str, variable: str) -> Path:
    """The folder that ``variable`` names, created if missing. Raises ConfigError when nothing can be written there."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"environment variable {variable} must name a folder that can be made, got {path!r}: {error}"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"environment variable {variable} must name a folder that can be written, got {path!r}"
        )
    return folder


def save(path: Path, content: Any) -> None:
    """Write ``content`` so that ``path`` is whole or absent. Raises OSError."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        torch.save(content, unfinished)
        os.replace(unfinished, path)
    except RuntimeError as error:  # torch's writer says so of a full disk
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{path}: {error}") from error
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def load(path: Path) -> Any:
    """The content of a dump, on the CPU. Raises DumpFileError."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DumpFileError(f"{path} does not exist") from None
    except Exception as error:  # whatever an arbitrary file makes torch's readers raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DumpFileError(f"{path} is not a file of tensors: {reason}") from error


def named_tensors(content: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor within ``content`` and its place, e.g. ``outputs.1``; a bare tensor's place is empty."""
    if isinstance(content, torch.Tensor):
        yield path, content
        return
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list | tuple):
        items = enumerate(content)
    else:
        return
    for key, value in items:
        yield from named_tensors(value, f"{path}.{key}" if path else str(key))
