"""``debug_dump_path``: what the compiler made of a model, as text, in ``<path>/rank_<i>/``."""

import contextlib
import dis
import io
from pathlib import Path
from types import CodeType
from typing import Any

from atom.config import CompilationConfig


def dump_graph(config: CompilationConfig, rank: int, name: str, graph: Any) -> None:
    """Write a graph module as readable Python."""
    if config.debug_dump_path:
        _write(config, rank, name, graph.print_readable(print_output=False))


def dump_code(config: CompilationConfig, rank: int, name: str, old: CodeType, new: CodeType) -> None:
    """Write what Dynamo turned ``old`` into: bytecode, and Python where ``depyf`` is installed."""
    if not config.debug_dump_path:
        return
    text = io.StringIO()
    for title, code in (("original", old), ("compiled", new)):
        text.write(f"{title}: {code.co_qualname}, {code.co_filename}:{code.co_firstlineno}\n")
        dis.dis(code, file=text)
        text.write("\n")
    _write(config, rank, f"{name}_bytecode.txt", text.getvalue())
    with contextlib.suppress(ImportError):
        import depyf

        _write(config, rank, f"{name}_decompiled.py", depyf.decompile(new))


def _write(config: CompilationConfig, rank: int, name: str, text: str) -> None:
    folder = Path(config.debug_dump_path) / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
