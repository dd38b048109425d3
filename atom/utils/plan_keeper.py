"""Uses and makes the plan of one call: how a start finds everything compiled and does not trace."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from atom import __version__
from atom.utils import backends, compiled_plan, plan_store
from atom.utils.cache_folder import check_private
from atom.utils.call_description import describe_call, source_files
from atom.utils.compile_cache import (
    ArtifactFolder,
    compilation_counter,
    compile_cache_root,
    record_entry,
)
from atom.utils.compiled_plan import Unplannable
from atom.utils.logging import init_logger

logger = init_logger(__name__)


class PlanKeeper:
    """The plan of the first call of its kind: ``recall`` it, or let the call be traced and ``keep`` one.

    Plans spare time only. Whatever goes wrong here is logged, and the call is traced.

    Args:
        backend: compiles the call if it is traced.
        call: arguments of ``module`` by position and by name.
        free: dimensions of arguments that vary from call to call.
        skip: attributes of modules that have no part in what is computed.
    """

    def __init__(
        self,
        backend: backends.VllmBackend,
        module: nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        free: Mapping[str, Sequence[int]],
        skip: Iterable[str],
    ):
        self._backend, self._module, self._call = backend, module, call
        self._stitching: compiled_plan.Stitching | None = None
        self._seen: list[tuple[Any, Any]] = []  # the graph's inputs and outputs in the first call
        self._hook: Any = None
        self._key = ""
        signature = inspect.signature(type(module).forward)
        self._names = list(signature.parameters)[1:]
        if not _may_plan(backend):
            return
        try:
            arguments = signature.bind(module, *call[0], **call[1]).arguments
            self._root = compile_cache_root(backend.compilation_config.cache_dir)
            facts = [
                [plan_store.FORMAT, __version__, backend.config.compute_hash()],
                [backend.manager.compute_hash(backend.config), backend.folder_name, backend.rank],
                describe_call(module, arguments, free, skip),
            ]
            self._key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
            backend.plans = self
        except Exception as error:
            logger.debug("No plan is looked for: %s: %s", type(error).__name__, error)

    def recall(self) -> Callable[..., Any] | None:
        """``(module, *args, **kwargs) ->`` the call's result, from a plan; None if there is none to trust."""
        if not self._key:
            return None
        try:
            for path, plan in plan_store.read_plans(self._root, self._key):
                try:
                    return self._use(plan)
                except Exception as reason:
                    logger.info("Tracing again, the plan %s is not used: %s", path.name, reason)
                    path.unlink(missing_ok=True)
        except Exception as error:
            logger.debug("Plans are not read: %s: %s", type(error).__name__, error)
        return None

    def _use(self, plan: dict[str, Any]) -> Callable[..., Any]:
        folder = check_private(self._root / plan["folder"], must_exist=True)
        compiler = backends.make_compiler(self._backend.compilation_config)
        compiler.initialize_cache(str(folder))
        with ArtifactFolder(folder).lock():
            artifacts = [compiler.load_artifact(key, source) for key, source in plan["pieces"]]
        call = self._bind(plan, artifacts)
        record_entry(folder.parents[1], {"model": self._backend.config.model})
        self._backend.compilation_config.state.traced_files |= set(plan["files"])
        self._backend.set_folder(folder)
        compilation_counter.num_loaded += len(artifacts)
        compilation_counter.num_planned += 1
        return call

    def _bind(self, plan: dict[str, Any], artifacts: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        inputs = compiled_plan.Inputs(plan["inputs"], self._module, self._call, self._names)
        return inputs.bind(compiled_plan.build(plan, inputs, artifacts))

    def take(self, graph: fx.GraphModule, backend: backends.VllmBackend, changes_inputs: bool) -> None:
        """Called while compiling: note the stitched graph, and the values of its first call."""
        try:
            if changes_inputs:
                raise Unplannable("the call writes to an input")
            compiled_plan.check_writes(graph.graph)
            handles = backend.manager.artifacts
            if not all(handle for handle, _ in handles.values()):
                raise Unplannable("a piece has no artifact")
            self._pieces = sorted({(handle[0], source) for handle, source in handles.values()})
            compiled = [item for item in backend.piecewise_graphs if not item.is_splitting_graph]
            indices = {
                item.submod_name: self._pieces.index((handles[i][0][0], handles[i][1]))
                for i, item in enumerate(compiled)
            }
            parts = {item.submod_name: item.graph for item in backend.piecewise_graphs}
            self._stitching = compiled_plan.Stitching(backend.split_gm.graph, parts, indices)
        except Exception as reason:
            logger.debug("No plan is kept: %s", reason)
            return

        def see(_: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            self._seen.append((inputs, outputs))

        self._hook = backend.split_gm.register_forward_hook(see)

    def keep(self, code: CodeType, result: Any) -> None:
        """Write a plan for the call that was traced to ``code`` and gave ``result``, if it gives the same."""
        try:
            if self._stitching is not None:
                self._keep(code, result)
        except Exception as reason:
            logger.debug("No plan is kept: %s: %s", type(reason).__name__, reason)

    def close(self) -> None:
        """Let go of the module and of the call: compiled code refers to the backend."""
        self._backend.plans = None
        if self._hook is not None:
            self._hook.remove()
        del self._module, self._call, self._seen, self._stitching, self._hook

    def _keep(self, code: CodeType, result: Any) -> None:
        stitching, ((inputs, outputs),) = self._stitching, self._seen
        compiled_plan.check_bytecode(code, stitching.sources)
        places = compiled_plan.Inputs(stitching.sources, self._module, self._call, self._names)
        held = [value for value, (kind, *_) in zip(inputs, stitching.sources, strict=True) if kind == "held"]
        if not all(found is value for found, value in zip(places.held(), held, strict=True)):
            raise Unplannable("the module holds another tensor than the graph was given")
        plan = {
            "folder": self._backend.folder,
            "files": source_files(self._module, self._backend.traced_files),
            "pieces": self._pieces,
            "inputs": stitching.sources,
            "steps": stitching.steps,
            "result": compiled_plan.result_of(result, outputs, stitching.outputs),
        }
        plan = json.loads(json.dumps(plan))
        compiler = self._backend.manager.compiler
        with torch.no_grad(), ArtifactFolder(self._root / plan["folder"]).lock():
            artifacts = [compiler.load_artifact(key, source) for key, source in plan["pieces"]]
        again = self._bind(plan, artifacts)(self._module, *self._call[0], **self._call[1])
        if not compiled_plan.is_same(again, result):
            raise Unplannable("its result is not the traced code's, bit for bit")
        plan_store.write_plan(self._root, self._key, plan)
        compilation_counter.num_plans_saved += 1
        logger.debug("A plan is kept: the next start need not trace %s", type(self._module).__name__)


def _may_plan(backend: backends.VllmBackend) -> bool:
    """Not with what a plan does not know, nor on several ranks: one of them alone must not run the model twice."""
    config, compilation = backend.config, backend.compilation_config
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size, config.prefill_context_parallel_size)
    return (
        all(size == 1 for size in sizes)
        and not (config.enable_dp_attention or config.enable_expert_parallel)
        and not (compilation.debug_dump_path or compilation.copies_inputs)
        and not (compilation.compile_sizes or compilation.state.compile_sizes)
    )
