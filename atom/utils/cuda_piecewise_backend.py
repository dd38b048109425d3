"""One compiled piece of a model: code for any number of tokens, and for chosen numbers code of their own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ConcreteSizeEntry:
    """Code of a piece for exactly ``runtime_shape`` tokens."""

    runtime_shape: int
    compiled: bool = False
    runnable: Callable[..., Any] | None = None


class PiecewiseBackend:
    """Callable with the signature of the piece's graph.

    The first call runs the general code. A later call with one of ``compile_sizes`` tokens compiles for that
    number, once, and runs what came out.

    Args:
        graph: the piece, uncompiled.
        compiled_graph_for_general_shape: its code for any number of tokens.
        sym_shape_indices: positions of the arguments that are numbers of tokens. Empty: the piece's size is
            unknown, and it has general code only.
        compile_sizes: numbers of tokens that get code of their own.
        compile_for_size: ``(arguments, number) -> code``.
    """

    def __init__(
        self,
        graph: Any,
        compiled_graph_for_general_shape: Callable[..., Any],
        sym_shape_indices: list[int],
        compile_sizes: Iterable[int],
        compile_for_size: Callable[[tuple[Any, ...], int], Callable[..., Any]],
    ):
        self.graph = graph
        self.compiled_graph_for_general_shape = compiled_graph_for_general_shape
        self.sym_shape_indices = sym_shape_indices
        sizes = compile_sizes if sym_shape_indices else ()
        self.concrete_size_entries = {size: ConcreteSizeEntry(size) for size in sizes}
        self.to_be_compiled_sizes = set(self.concrete_size_entries)
        self._compile_for_size = compile_for_size
        self._is_first_run = True

    def __call__(self, *args: Any) -> Any:
        if self._is_first_run or not self.concrete_size_entries:
            self._is_first_run = False
            return self.compiled_graph_for_general_shape(*args)
        entry = self.concrete_size_entries.get(args[self.sym_shape_indices[0]])
        if entry is None:
            return self.compiled_graph_for_general_shape(*args)
        if not entry.compiled:
            entry.runnable = self._compile_for_size(args, entry.runtime_shape)
            entry.compiled = True
            self.to_be_compiled_sizes.discard(entry.runtime_shape)
        return entry.runnable(*args)
