"""Compilers of graph pieces behind one interface: Inductor's standalone artifacts, and none at all.

What an artifact was made from is told by :func:`graph_fingerprint`; whether its files are whole, by
:mod:`atom.utils.compile_cache`.
"""

import atexit
import hashlib
import json
import operator
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from atom.config import Config
from atom.platforms import get_platform
from atom.utils.compile_cache import ArtifactFolder, StaleArtifact, compilation_counter
from atom.utils.logging import init_logger

__all__ = [
    "AlwaysHitShapeEnv",
    "CompilerInterface",
    "EagerAdaptor",
    "InductorAdaptor",
    "InductorStandaloneAdaptor",
    "graph_fingerprint",
]

logger = init_logger(__name__)

Compiled = Callable[..., Any]


class CompilerInterface(ABC):
    """Turns one graph into a callable with the graph's signature, and may keep the result on disk."""

    name: str  # unique; part of the cache's index

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        """Called once, before everything else.

        Args:
            cache_dir: folder for artifacts, of this compiled module and rank alone.
            disable_cache: keep nothing and load nothing.
            prefix: what is compiled (``backbone``, ``drafter``), for messages.
        """
        return None

    def compute_hash(self, config: Config) -> str:
        """A hash of everything about this compiler and machine that decides what it makes of a graph."""
        return ""

    @abstractmethod
    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: dict[str, Any],
        runtime_shape: int | None = None,
        key: str | None = None,
    ) -> tuple[Compiled, Any]:
        """Compile ``graph``, which stays as it is, and return ``(callable, handle or None)``.

        Args:
            example_inputs: fake tensors with symbolic sizes; tensors and numbers where ``runtime_shape`` is given.
            compiler_config: options of the compiler; they win over its own.
            runtime_shape: number of tokens to specialise for; None: any number.
            key: name for the artifact; None: do not save. Without an artifact the handle is None.
        """

    def load(
        self,
        handle: Any,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        graph_index: int,
        runtime_shape: int | None = None,
    ) -> Compiled:
        """The callable that ``compile`` returned with ``handle``. Raises StaleArtifact if it is not to be had."""
        raise StaleArtifact(f"{self.name} keeps no artifacts")

    def load_artifact(self, key: str, source: str) -> Compiled:
        """The code of artifact ``key``, made from the graph of fingerprint ``source``, without that graph.

        It returns a tuple always. Raises StaleArtifact if it is not to be had.
        """
        raise StaleArtifact(f"{self.name} keeps no artifacts")


class EagerAdaptor(CompilerInterface):
    """Runs graphs as they are: ``use_inductor`` off, and tests of everything around the compiler."""

    name = "eager"

    def compile(self, graph, example_inputs, compiler_config, runtime_shape=None, key=None):
        compilation_counter.num_compiled += 1
        return graph.forward, None


class InductorStandaloneAdaptor(CompilerInterface):
    """Inductor through ``standalone_compile`` (torch 2.8 and later): C++ on the CPU, Triton on devices."""

    name = "inductor_standalone"

    def __init__(self) -> None:
        self._folder: ArtifactFolder | None = None
        self._scratch: Path | None = None

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        if not disable_cache:
            self._folder = ArtifactFolder(Path(cache_dir))
            atexit.register(self._folder.close)

    def compute_hash(self, config: Config) -> str:
        facts = get_platform(config.device).describe()
        return _sha256(
            {
                "torch": [torch.__version__, torch.version.git_version],
                "triton": _triton_version(),
                "machine": {name: facts[name] for name in sorted(facts) if name not in ("memory", "cores")},
                "threads": torch.get_num_threads(),  # Inductor writes the number into its C++
                "matmul": [
                    torch.get_float32_matmul_precision(),
                    torch.are_deterministic_algorithms_enabled(),
                ],
                "inductor": _inductor_settings(),
            }
        )

    def compile(self, graph, example_inputs, compiler_config, runtime_shape=None, key=None):
        from torch._inductor import standalone_compile

        compilation_counter.num_compiled += 1
        settings = dict(compiler_config)
        shapes = "from_tracing_context"
        if runtime_shape is not None:
            shapes = "from_example_inputs"
            # Tuning is for Triton. The CPU's GEMMs are a library's, and timing C++ templates takes minutes.
            if any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in example_inputs):
                settings = {"max_autotune": True, "coordinate_descent_tuning": True} | settings
        with self._scratch_space():
            artifact = standalone_compile(
                graph,  # torch works on a copy
                list(example_inputs),
                dynamic_shapes=shapes,
                options={"config_patches": settings},
            )
        handle = None
        if self._folder is not None and key is not None:
            source = graph_fingerprint(graph, example_inputs)
            try:
                path = self._folder.publish(key, source, lambda aside: self._write(artifact, aside))
                compilation_counter.num_saved += 1
                handle = (key, str(path))
            except Exception as error:  # torch raises many kinds for a graph that it cannot serialise
                logger.warning("Compiled code of %s is not kept: %s", key, error)
        return _unwrapped(artifact, graph), handle

    def load(self, handle, graph, example_inputs, graph_index, runtime_shape=None):
        if not (isinstance(handle, tuple) and len(handle) == 2):
            raise StaleArtifact(f"{handle!r} is no handle")
        # The path in the handle is for people: only the key says where to look.
        artifact = self.load_artifact(handle[0], graph_fingerprint(graph, example_inputs))
        compilation_counter.num_loaded += 1
        return _unwrapped(artifact, graph)

    def load_artifact(self, key: str, source: str) -> Compiled:
        from torch._inductor import CompiledArtifact

        if self._folder is None:
            raise StaleArtifact("the cache is off")
        path = self._folder.find(key, source)
        try:
            with self._scratch_space():
                # Torch writes into the folder that it loads from: what was checked stays as it is. A new one each
                # time, as the libraries of an earlier load are mapped.
                own = tempfile.mkdtemp(dir=self._scratch, prefix="loaded-")
                shutil.copytree(path, own, dirs_exist_ok=True)
                return CompiledArtifact.load(path=own, format="unpacked")
        except Exception as error:  # whole and ours, and still not loadable: built again
            raise StaleArtifact(f"torch cannot load it ({type(error).__name__}: {error})") from error

    @contextmanager
    def _scratch_space(self) -> Iterator[None]:
        """Give Inductor and Triton a folder of this process: what they find there, they trust.

        Afterwards Triton has its own folder again, where the kernels of ATOM are kept from start to start.
        """
        if self._folder is not None:
            self._scratch = self._folder.work_folder()
        elif self._scratch is None or not self._scratch.is_dir():
            self._scratch = Path(tempfile.mkdtemp(prefix="atom-compile-"))
            atexit.register(shutil.rmtree, self._scratch, ignore_errors=True)
        triton_folder = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._scratch)
        os.environ["TRITON_CACHE_DIR"] = str(self._scratch / "triton")
        try:
            yield
        finally:
            if triton_folder is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = triton_folder

    def _write(self, artifact: Any, aside: Path) -> None:
        """Save ``artifact`` with the libraries that Inductor built for it, which torch leaves behind."""
        artifact.save(path=str(aside), format="unpacked")
        aside.chmod(0o700)
        for path in self._scratch.rglob("*"):
            if path.suffix in (".so", ".cpp"):
                target = aside / path.relative_to(self._scratch)
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    os.link(path, target)


class AlwaysHitShapeEnv(ShapeEnv):
    """A shape environment in which every guard of a cached graph holds.

    For looking a graph up outside of Dynamo's tracing: which sizes are allowed was settled by the caller, who
    marked them dynamic, and no guard will be evaluated later.
    """

    def evaluate_guards_expression(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def get_pruned_guards(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def produce_guards_expression(self, *args: Any, **kwargs: Any) -> str:
        return ""


class InductorAdaptor(CompilerInterface):
    """Inductor before torch 2.8, which kept artifacts only when its internals were patched."""

    name = "inductor"

    def __init__(self) -> None:
        raise RuntimeError(
            f"InductorAdaptor is for torch below 2.8, got {torch.__version__}: use InductorStandaloneAdaptor"
        )

    def compile(self, graph, example_inputs, compiler_config, runtime_shape=None, key=None):
        raise NotImplementedError("InductorAdaptor cannot be constructed")


def _unwrapped(artifact: Compiled, graph: fx.GraphModule) -> Compiled:
    """``artifact`` with the return value of ``graph``."""
    if isinstance(graph.graph.output_node().args[0], (tuple, list)):
        return artifact

    def call(*args: Any) -> Any:
        result = artifact(*args)  # a tuple when loaded; when just compiled, that depends on the torch version
        return result[0] if isinstance(result, (tuple, list)) else result

    return call


def graph_fingerprint(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """A hash of everything that a compiler reads of a graph: equal for graphs that one artifact can serve.

    Covers operators, constants, the contents of tensors that the graph itself holds, and the inputs' types,
    sizes, strides and devices, and which of them share memory. Names of nodes and source lines do not count.
    """
    parts: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    storages: dict[int, int] = {}
    for value in example_inputs:
        if isinstance(value, torch.Tensor):
            shared = storages.setdefault(value.untyped_storage()._cdata, len(storages))
            parts.append([shared, *_describe_tensor(value), str(value.storage_offset())])
        else:
            parts.append([type(value).__name__, str(value)])
    _describe_graph(graph, parts)
    return _sha256(parts)


def _describe_tensor(tensor: torch.Tensor) -> list[str]:
    layout = [tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, type(tensor).__name__]
    return [str(item) for item in layout]


def _describe_graph(graph: fx.GraphModule, parts: list[Any]) -> None:
    numbers: dict[fx.Node, int] = {}
    for number, node in enumerate(graph.graph.nodes):
        numbers[node] = number
        target = "" if node.op == "placeholder" else _describe_target(node.target)
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda used: f"%{numbers[used]}")
        parts.append([node.op, target, repr(arguments)])
        if node.op in ("get_attr", "call_module"):
            held = operator.attrgetter(node.target)(graph)
            if isinstance(held, fx.GraphModule):
                _describe_graph(held, parts)
            elif isinstance(held, torch.Tensor):
                content = held.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                parts.append([*_describe_tensor(held), hashlib.sha256(content).hexdigest()])


def _describe_target(target: Any) -> str:
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", None)
    return str(target) if name is None else f"{target.__module__}.{name}"


def _triton_version() -> str:
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _inductor_settings() -> list[str]:
    """Every public setting of Inductor, whether set in code or by a variable."""
    from torch._inductor import config

    settings = config.save_config_portable().items()
    return sorted(re.sub(r" at 0x[0-9a-f]+", "", f"{name}={value!r}") for name, value in settings)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
