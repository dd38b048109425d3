"""The backend that ATOM gives to ``torch.compile``: cuts a model's graph at its split ops and compiles the pieces."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from atom.config import CompilationConfig, CompilationLevel, Config
from atom.errors import ConfigError
from atom.utils.cache_folder import check_private, write_aside
from atom.utils.compile_cache import (
    ArtifactFolder,
    Index,
    StaleArtifact,
    cache_hash,
    compilation_counter,
    compile_cache_root,
    record_entry,
)
from atom.utils.compile_dump import dump_graph
from atom.utils.compiler_interface import (
    CompilerInterface,
    EagerAdaptor,
    InductorAdaptor,
    InductorStandaloneAdaptor,
    graph_fingerprint,
)
from atom.utils.cuda_piecewise_backend import PiecewiseBackend
from atom.utils.custom_register import is_spliting_op
from atom.utils.logging import init_logger

logger = init_logger(__name__)


def make_compiler(config: CompilationConfig) -> CompilerInterface:
    """The compiler of pieces that ``config`` asks for and the installed torch has."""
    if not config.use_inductor:
        return EagerAdaptor()
    import torch._inductor

    return (
        InductorStandaloneAdaptor() if hasattr(torch._inductor, "standalone_compile") else InductorAdaptor()
    )


class CompilerManager:
    """Compiles pieces, or takes them from the cache: what was compiled once is not compiled again.

    ``cache`` maps ``(runtime shape or None, graph index, compiler name)`` to the compiler's handle. Pieces that
    are alike, as the layers of a model are, share one artifact.
    """

    def __init__(self, compilation_config: CompilationConfig, compiler: CompilerInterface | None = None):
        self.compilation_config = compilation_config
        self.compiler = compiler or make_compiler(compilation_config)
        self.cache: Index = {}
        self._folder: ArtifactFolder | None = None
        self._made: dict[tuple[int | None, str], tuple[Callable[..., Any], Any]] = {}
        self.artifacts: dict[int, tuple[Any, str]] = {}  # general code: piece -> (handle, fingerprint)

    def compute_hash(self, config: Config) -> str:
        return f"{self.compiler.name}:{self.compiler.compute_hash(config)}"

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        """Read the index of ``cache_dir``. Raises ConfigError for a folder that is not this user's own."""
        if not disable_cache:
            self._folder = ArtifactFolder(Path(cache_dir))
            self.cache = self._folder.read_index()
        self.compiler.initialize_cache(cache_dir, disable_cache, prefix)

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        graph_index: int = 0,
        runtime_shape: int | None = None,
    ) -> Callable[..., Any]:
        """The code of one piece: an identical piece's, the cache's, or compiled now.

        Args:
            runtime_shape: number of tokens to specialise for; None: any.
        """
        source = graph_fingerprint(graph, example_inputs)
        place = (runtime_shape, graph_index, self.compiler.name)
        with self._folder.lock() if self._folder is not None else nullcontext():
            if (runtime_shape, source) in self._made:
                compilation_counter.num_shared += 1
                code, handle = self._made[runtime_shape, source]
            elif self._folder is None:
                code, handle = self._build(graph, example_inputs, place)
            else:
                code, handle = self._load_or_build(graph, example_inputs, place)
            self._remember(place, handle)
        self._made[runtime_shape, source] = code, handle
        if runtime_shape is None:
            self.artifacts[graph_index] = handle, source
        return code

    def _load_or_build(self, graph: fx.GraphModule, example_inputs: Sequence[Any], place: tuple) -> tuple:
        runtime_shape, graph_index, _ = place
        if place not in self.cache:
            self.cache = self._folder.read_index() | self.cache  # another process may just have compiled it
        handle = self.cache.get(place)
        if handle is not None:
            try:
                return self.compiler.load(handle, graph, example_inputs, graph_index, runtime_shape), handle
            except StaleArtifact as reason:
                compilation_counter.num_rejected += 1
                logger.warning("Compiling piece %d again, its artifact is not used: %s", graph_index, reason)
        return self._build(graph, example_inputs, place)

    def _build(self, graph: fx.GraphModule, example_inputs: Sequence[Any], place: tuple) -> tuple:
        runtime_shape, graph_index, _ = place
        start = time.perf_counter()
        code, handle = self.compiler.compile(
            graph,
            example_inputs,
            self.compilation_config.inductor_compile_config,
            runtime_shape,
            f"artifact_shape_{runtime_shape}_subgraph_{graph_index}",
        )
        elapsed = time.perf_counter() - start
        size = "any number of" if runtime_shape is None else runtime_shape
        logger.debug("Compiled piece %d for %s tokens in %.2f s", graph_index, size, elapsed)
        return code, handle

    def _remember(self, place: tuple, handle: Any) -> None:
        if handle is None or self._folder is None or self.cache.get(place) == handle:
            return
        self.cache = self._folder.read_index() | self.cache | {place: handle}
        try:
            self._folder.write_index(self.cache)
        except OSError as error:  # the folder was cleared or the disk is full: the next start compiles
            logger.warning("The compile cache's index is not kept: %s", error)


@dataclass(frozen=True)
class SplitItem:
    """One part of a split graph; ``graph_id`` gives its place in the order of execution."""

    submod_name: str
    graph_id: int
    is_splitting_graph: bool
    graph: fx.GraphModule


def split_graph(
    graph: fx.GraphModule, ops: Iterable[str] | None = ()
) -> tuple[fx.GraphModule, list[SplitItem]]:
    """Cut ``graph`` at its split ops: those marked by ``mark_spliting_op``, and those that ``ops`` names.

    Args:
        ops: more split ops, as ``namespace.op``. None: the graph stays whole, a single part.

    Returns:
        The stitching module, which calls ``submod_<id>`` one after the other, and its parts in that order. A
        split op has a part of its own.
    """
    names = frozenset(ops or ())
    part_of: dict[fx.Node, int] = {}
    split_parts: set[int] = set()
    part = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if ops is not None and node.op == "call_function" and is_spliting_op(node.target, names):
            part += 1
            part_of[node] = part
            split_parts.add(part)
            part += 1
        elif _takes_from_split_op(node, part_of, split_parts):
            part_of[node] = part_of[node.args[0]]  # only tensors and numbers cross from part to part
        else:
            part_of[node] = part
    # The order must be kept: the parts write to each other's tensors, which the graph's edges do not show.
    stitched = split_module(graph, graph, lambda node: part_of[node], keep_original_order=True)
    items = []
    for name, module in stitched.named_children():
        if isinstance(module, fx.GraphModule) and name.startswith("submod_"):
            graph_id = int(name.removeprefix("submod_"))
            items.append(SplitItem(name, graph_id, graph_id in split_parts, module))
    return stitched, sorted(items, key=lambda item: item.graph_id)


def _takes_from_split_op(node: fx.Node, part_of: dict[fx.Node, int], split_parts: set[int]) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
        return False
    return part_of.get(node.args[0]) in split_parts if isinstance(node.args[0], fx.Node) else False


class PiecewiseCompileInterpreter(fx.Interpreter):
    """Finds each piece's inputs by running the stitched graph on fake tensors, then compiles the pieces.

    Layers are alike: of pieces that neither change nor return their inputs' memory, the first of each kind runs, and
    the others get tensors of the same layout.

    Args:
        compile_submod_names: the parts to compile; the others run as they are.
        make_piece: ``(name, fake arguments) -> callable`` that takes the part's place.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        compile_submod_names: Sequence[str],
        make_piece: Callable[[str, tuple[Any, ...]], Callable[..., Any]],
    ):
        super().__init__(module)
        from torch._guards import detect_fake_mode

        self.fake_mode = detect_fake_mode()
        self._names = frozenset(compile_submod_names)
        self._make_piece = make_piece
        self._arguments: dict[str, tuple[Any, ...]] = {}
        self._results: dict[str, Any] = {}  # by kind of piece
        self.changes_inputs = True  # or perhaps; known after ``run``

    def run(self, *args: Any) -> Any:
        from torch._dispatch.python import enable_python_dispatcher

        fakes = [self.fake_mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
        versions = _versions(fakes)
        with self.fake_mode, enable_python_dispatcher():
            result = super().run(*fakes)
        self.changes_inputs = versions is None or versions != _versions(fakes)
        for name, arguments in self._arguments.items():
            # Instance attributes come before submodules: printing the module still shows the part's graph.
            self.module.__dict__[name] = self._make_piece(name, arguments)
        return result

    def call_module(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in self._names:
            return super().call_module(target, args, kwargs)
        self._arguments[target] = args
        kind = graph_fingerprint(getattr(self.module, target), args)
        if kind in self._results:
            return _alike(self._results[kind])
        before = _versions(args)
        result = super().call_module(target, args, kwargs)
        if before is not None and before == _versions(args) and not _storages(result) & _storages(args):
            self._results[kind] = result
        return result


def _alike(values: Any) -> Any:
    """Fresh tensors of the layouts of ``values``; what shares memory there does so here."""
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    sharers = Counter(x.untyped_storage()._cdata for x in tensors)
    buffers: dict[int, torch.Tensor] = {}

    def make(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        layout = {"dtype": tensor.dtype, "device": tensor.device}
        if (
            sharers[storage._cdata] == 1
            and isinstance(offset := tensor.storage_offset(), int)
            and offset == 0
        ):
            return torch.empty_strided(tensor.shape, tensor.stride(), **layout)
        if storage._cdata not in buffers:
            buffers[storage._cdata] = torch.empty(storage.nbytes() // tensor.itemsize, **layout)
        whole = buffers[storage._cdata]
        whole = whole if whole.dtype == tensor.dtype else whole.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return pytree.tree_map_only(torch.Tensor, make, values)


def _versions(values: Any) -> list[int] | None:
    """How often each tensor was written to; None where they do not count."""
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
    return None if any(x.is_inference() for x in tensors) else [x._version for x in tensors]


def _storages(values: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)}


class VllmBackend:
    """Compiles one graph of one module; ``torch.compile(backend=VllmBackend(config))``.

    At level 3 the graph is cut at the split ops; at level 2 it is one piece.

    Args:
        prefix: folder of its artifacts; default: ``tag``, numbered from the engine's second such module on.
        rank: the worker's, which has a folder of its own.
        tag: ``backbone`` or ``drafter``.
        sources: files whose change makes artifacts stale, beside those that Dynamo traced.
    """

    def __init__(
        self,
        config: Config,
        prefix: str = "",
        rank: int = 0,
        tag: str = "backbone",
        sources: Iterable[str] = (),
    ):
        self.config = config
        self.compilation_config = config.compilation_config
        self.rank = rank
        self.manager = CompilerManager(self.compilation_config)
        self.split_gm: fx.GraphModule | None = None
        self.piecewise_graphs: list[SplitItem] = []
        self._prefix = prefix
        self._tag = tag
        self._sources = tuple(sources)
        self._is_called = False
        self.folder = ""  # of the artifacts, below the cache's root
        self.traced_files: set[str] = set()
        self.plans: Any = None  # the PlanKeeper that makes a plan of what is compiled

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        assert not self._is_called, "VllmBackend compiles one graph; make another for another graph"
        self._is_called = True
        compilation_counter.num_graphs_seen += 1
        self._dump("graph.py", graph)
        self._initialize_cache(graph)
        is_cut = self.compilation_config.level == CompilationLevel.PIECEWISE
        ops = (self.compilation_config.splitting_ops or ()) if is_cut else None
        self.split_gm, self.piecewise_graphs = split_graph(graph, ops)
        self._dump("split_graph.py", self.split_gm)
        names = [item.submod_name for item in self.piecewise_graphs if not item.is_splitting_graph]
        self._index_of = {name: index for index, name in enumerate(names)}
        compilation_counter.num_pieces += len(names)
        interpreter = PiecewiseCompileInterpreter(self.split_gm, names, self._make_piece)
        interpreter.run(*example_inputs)
        for item in self.piecewise_graphs:
            if item.is_splitting_graph:  # what calling a module adds is more than the op's own launch
                self.split_gm.__dict__[item.submod_name] = item.graph.forward
        if self.plans is not None:
            self.plans.take(graph, self, interpreter.changes_inputs)
        if self.compilation_config.copies_inputs:
            return CopiedInputs(self.split_gm, _per_token_inputs(graph))
        return self.split_gm

    def _initialize_cache(self, graph: fx.GraphModule) -> None:
        config, state = self.config, self.compilation_config.state
        files = {file for file in (*self._sources, *_traced_files()) if Path(file).is_file()}
        self.traced_files = files
        state.traced_files |= files
        compiler_hash = self.manager.compute_hash(config)
        digest = cache_hash(config.compute_hash(), files, compiler_hash)
        prefix = self.folder_name
        try:
            entry = check_private(compile_cache_root(self.compilation_config.cache_dir) / digest)
            folder = check_private(check_private(entry / f"rank_{self.rank}") / prefix)
            self.manager.initialize_cache(str(folder), prefix=prefix)
            facts = {
                "model": config.model,
                "level": int(self.compilation_config.level),
                "device": config.device,
            }
            record_entry(entry, facts | {"torch": torch.__version__, "compiler": compiler_hash})
            if not (folder / "computation_graph.py").exists():
                write_aside(folder / "computation_graph.py", graph.print_readable(print_output=False))
        except (ConfigError, OSError) as error:
            if self.compilation_config.cache_dir:
                raise
            logger.warning("Compiling without a cache: %s", error)
            self.manager.initialize_cache("", disable_cache=True, prefix=prefix)
            return
        self.set_folder(folder)

    def set_folder(self, folder: Path) -> None:
        """The artifacts of this module are in ``folder``."""
        self.compilation_config.state.local_cache_dir = str(folder)
        self.folder = "/".join(folder.parts[-3:])
        logger.info("Compile cache: %s", folder)

    @cached_property
    def folder_name(self) -> str:
        """Name of this module's folder; asking takes the next number of the engine's."""
        by_tag = self.compilation_config.state.modules_by_tag
        number = by_tag.get(self._tag, 0)
        by_tag[self._tag] = number + 1
        return self._prefix or (f"{self._tag}_{number}" if number else self._tag)

    def _make_piece(self, name: str, arguments: tuple[Any, ...]) -> PiecewiseBackend:
        index = self._index_of[name]
        graph = self.split_gm.get_submodule(name)
        self._dump(f"piece_{index}.py", graph)
        return PiecewiseBackend(
            graph,
            self.manager.compile(graph, arguments, index),
            [i for i, value in enumerate(arguments) if isinstance(value, torch.SymInt)],
            self.compilation_config.state.compile_sizes,
            lambda real, size: self._compile_for_size(graph, real, index, size),
        )

    def _compile_for_size(
        self, graph: fx.GraphModule, arguments: tuple[Any, ...], index: int, size: int
    ) -> Callable[..., Any]:
        start = time.perf_counter()
        with torch.inference_mode(False), torch.no_grad():  # as Dynamo compiles the general code
            code = self.manager.compile(graph, arguments, index, size)
        elapsed = time.perf_counter() - start
        self.compilation_config.state.compilation_time += elapsed
        logger.info("Piece %d for %d tokens was ready after %.2f s", index, size, elapsed)
        return code

    def _dump(self, name: str, graph: fx.GraphModule) -> None:
        dump_graph(self.compilation_config, self.rank, f"{self._prefix or self._tag}_{name}", graph)


class CopiedInputs:
    """Calls a graph with every input that has one row a token copied to a fixed address.

    The buffers have the size of the first call. A call with more rows than they hold is passed through: no
    recorded graph has that size.
    """

    def __init__(self, graph: Callable[..., Any], is_per_token: Sequence[int]):
        self.graph = graph
        self._buffers: dict[int, torch.Tensor | None] = dict.fromkeys(is_per_token)

    def __call__(self, *args: Any) -> Any:
        values = list(args)
        for index, buffer in self._buffers.items():
            value = args[index]
            if buffer is None:
                buffer = self._buffers[index] = torch.empty_like(value, memory_format=torch.contiguous_format)
            if len(value) <= len(buffer):
                values[index] = buffer[: len(value)].copy_(value)
        return self.graph(*values)


def _traced_files() -> set[str]:
    """Sources of what Dynamo has traced for the graph that is being compiled."""
    from torch._guards import TracingContext

    code = TracingContext.get_traced_code() or ()
    return {inlined.co_filename for inlined in code}


def _per_token_inputs(graph: fx.GraphModule) -> list[int]:
    """Positions of the inputs that are tensors with a symbolic first size."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    return [
        i
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt)
    ]
