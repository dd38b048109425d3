"""``@support_torch_compile``: a model class whose instances compile themselves at levels 2 and 3.

    @support_torch_compile
    class LlamaModel(nn.Module): ...

    with set_current_atom_config(config, rank=0):
        model = LlamaModel(hf_config)           # or LlamaModel(hf_config, atom_config=config)
    model(input_ids, positions)                 # compiles, or takes the code from the cache
    model(input_ids, positions)                 # runs the compiled code without evaluating guards

At level 0, at level 1 and outside of such a context an instance has ``do_not_compile`` set, and calling it is
calling its ``forward``. Dynamo is imported by the first call that compiles, and never otherwise.
"""

import dis
import functools
import inspect
import re
import threading
import time
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from atom.config import CompilationLevel, Config, get_current_atom_config, get_current_rank
from atom.utils.compile_cache import compilation_counter, compile_cache_root
from atom.utils.compile_dump import dump_code
from atom.utils.custom_register import mark_spliting_op
from atom.utils.logging import init_logger

__all__ = [
    "TorchCompileWrapperWithCustomDispatcher",
    "can_compile",
    "compilation_paused",
    "compile_as_is",
    "mark_spliting_op",
    "set_model_tag",
    "start_monitoring_torch_compile",
    "support_torch_compile",
]

logger = init_logger(__name__)

C = TypeVar("C", bound=type[nn.Module])
MAX_CODES = 8  # kinds of call that one module is compiled for
_CONFIG_ARGUMENTS = ("atom_config", "vllm_config")
_TENSOR = re.compile(r"(?:Optional\[)?(?:torch\.)?(?:Tensor|IntermediateTensors)\]?(?:\|None)?")
# Of an instance, and not of its model.
_OWN_ATTRIBUTES = (
    "do_not_compile",
    "use_custom_dispatcher",
    "_compile_config",
    "compiled_codes",
    "_dispatch",
    "_code_of_call",
)

_model_tag = "backbone"


@contextmanager
def set_model_tag(tag: str) -> Iterator[None]:
    """Name what is built inside, such as ``drafter``: its artifacts get a folder of that name."""
    global _model_tag
    assert tag != _model_tag, f"the model tag is {tag!r} already"
    previous, _model_tag = _model_tag, tag
    try:
        yield
    finally:
        _model_tag = previous


def compile_as_is(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Level 1: a model's bound ``forward`` through Dynamo alone, for any number of tokens.

    Raises at the first call what keeps Dynamo from tracing it whole.
    """
    from torch._dynamo.eval_frame import remove_from_cache

    remove_from_cache(forward.__func__.__code__)  # what other instances left counts towards Dynamo's limit
    return torch.compile(forward, backend="eager", fullgraph=True, dynamic=True)


def can_compile(model: nn.Module) -> bool:
    """Whether some part of ``model`` compiles itself."""
    parts = (m for m in model.modules() if isinstance(m, TorchCompileWrapperWithCustomDispatcher))
    return any(not part.do_not_compile for part in parts)


@contextmanager
def compilation_paused(model: nn.Module) -> Iterator[None]:
    """Inside, calling a part of ``model`` that compiles itself is calling its ``forward``."""
    parts = [m for m in model.modules() if isinstance(m, TorchCompileWrapperWithCustomDispatcher)]
    parts = [part for part in parts if not part.do_not_compile]
    for part in parts:
        part.do_not_compile = True
    try:
        yield
    finally:
        for part in parts:
            part.do_not_compile = False


@contextmanager
def start_monitoring_torch_compile(config: Config) -> Iterator[None]:
    """Add the time spent inside to the engine's ``compilation_time``, and log it with what was done."""
    before = compilation_counter.num_compiled, compilation_counter.num_loaded
    start = time.perf_counter()
    yield
    elapsed = time.perf_counter() - start
    config.compilation_config.state.compilation_time += elapsed
    logger.info(
        "torch.compile took %.2f s: %d pieces compiled, %d loaded",
        elapsed,
        compilation_counter.num_compiled - before[0],
        compilation_counter.num_loaded - before[1],
    )


class TorchCompileWrapperWithCustomDispatcher:
    """Base class that the decorator adds: compiles ``forward`` once for each kind of call, then skips Dynamo.

    Guards are not evaluated after that: whoever calls keeps dtypes, devices and ranks of the tensors as they were
    at the first call. Sizes of dynamic dimensions are free. Numbers and strings are part of the kind of call.
    """

    do_not_compile = True

    def set_up_compilation(self, config: Config | None, rank: int = 0) -> None:
        """Decide whether this instance compiles. ``config`` None: it does not.

        Raises:
            ConfigError: the ``cache_dir`` that was asked for cannot be used.
        """
        level = CompilationLevel.NO_COMPILATION if config is None else config.compilation_level
        # At level 1 the model runner compiles the whole model.
        self.do_not_compile = level < CompilationLevel.DYNAMO_ONCE
        self.compilation_level = level
        self.use_custom_dispatcher = level >= CompilationLevel.DYNAMO_ONCE
        if not self.do_not_compile:
            if config.compilation_config.cache_dir:
                compile_cache_root(config.compilation_config.cache_dir)
            self._compile_config, self._compile_rank = config, rank
            self._compile_tag = _model_tag
            self.compiled_codes: list[types.CodeType] = []
            self._dispatch: list[Callable[..., Any]] = []
            self._code_of_call: dict[tuple[Any, ...], int] = {}

    def dispatch_to_code(self, index: int) -> Callable[..., Any]:
        """``forward`` with its ``index``-th compiled code, without guards."""
        return functools.partial(self._dispatch[index], self)

    def call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)  # part of a larger graph
        index = self._code_of_call.get(_kind_of_call(args, kwargs))
        if index is not None:
            return self._dispatch[index](self, *args, **kwargs)
        return self._compile(args, kwargs)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call of its kind."""
        dynamic = list(_dynamic_tensors(self, args, kwargs))
        if any(tensor.shape[dim] < 2 for _, tensor, dim in dynamic):
            return self.forward(*args, **kwargs)  # Dynamo would bake a size of 0 or 1 into the code
        if len(self._dispatch) >= MAX_CODES:
            raise RuntimeError(
                f"{type(self).__name__}.forward was compiled for {MAX_CODES} kinds of call and is called in "
                f"another: {_kind_of_call(args, kwargs)}. An argument that is a number must not vary."
            )
        from atom.utils.backends import VllmBackend
        from atom.utils.plan_keeper import PlanKeeper

        config, kind = self._compile_config, _kind_of_call(args, kwargs)
        backend = VllmBackend(
            config,
            rank=self._compile_rank,
            tag=self._compile_tag,
            sources=[type(self).forward.__code__.co_filename],
        )
        with start_monitoring_torch_compile(config), torch.no_grad():
            free: dict[str, list[int]] = {}
            for name, _, dim in dynamic:
                free.setdefault(name, []).append(dim)
            plans = PlanKeeper(backend, self, (args, kwargs), free, _OWN_ATTRIBUTES)
            with closing(plans):
                planned = plans.recall()
                if planned is None:
                    result = self._trace(backend, dynamic, args, kwargs)
                    plans.keep(self.compiled_codes[-1], result)
            if planned is not None:
                self._dispatch.append(planned)
                result = planned(self, *args, **kwargs)
        self._code_of_call[kind] = len(self._dispatch) - 1
        return result

    def _trace(self, backend: Any, dynamic: list, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch._dynamo
        from torch._dynamo.convert_frame import register_bytecode_hook
        from torch._dynamo.eval_frame import remove_from_cache

        for _, tensor, dim in dynamic:
            torch._dynamo.mark_dynamic(tensor, dim)
        remove_from_cache(type(self).forward.__code__)  # another instance's code would fit by its guards
        handle = register_bytecode_hook(functools.partial(self.bytecode_hook, threading.get_ident()))
        num_codes = len(self.compiled_codes)
        # Only what is marked is dynamic. Otherwise a number that differs from another model's in this process, such
        # as a norm's epsilon, would become an input of the graph.
        baked = torch._dynamo.config.patch(specialize_float=True, automatic_dynamic_shapes=False)
        try:
            with baked:
                result = torch.compile(self.forward, fullgraph=True, backend=backend)(*args, **kwargs)
        finally:
            handle.remove()
        if len(self.compiled_codes) == num_codes:
            raise RuntimeError(f"Dynamo did not compile {type(self).__name__}.forward; is it disabled?")
        return result

    def bytecode_hook(self, thread: int, old_code: types.CodeType, new_code: types.CodeType) -> None:
        """Called by Dynamo for all code that it makes while this instance compiles: keep our own.

        Raises:
            RuntimeError: ``forward`` assigns to a buffer, which a recorded device graph would not repeat.
        """
        function = type(self).forward
        if old_code is not function.__code__ or threading.get_ident() != thread:
            return
        config = self._compile_config.compilation_config
        dump_code(config, self._compile_rank, f"{self._compile_tag}_forward", old_code, new_code)
        if config.use_cudagraph and "update" in _names_used(new_code):
            raise RuntimeError(
                f"{type(self).__name__}.forward assigns to a buffer or other attribute of a module; a recorded "
                "graph would not repeat that. Write into the tensor (copy_) or return it."
            )
        self.compiled_codes.append(new_code)
        compiled = types.FunctionType(
            new_code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        compiled.__kwdefaults__ = function.__kwdefaults__
        self._dispatch.append(compiled)


def support_torch_compile(
    cls: C | None = None, *, dynamic_arg_dims: dict[str, int | list[int]] | None = None
) -> Any:
    """Class decorator, see the module's docstring.

    Args:
        dynamic_arg_dims: dimensions of arguments of ``forward`` that vary from call to call. Default: the first
            of every argument annotated as a tensor or optional tensor.

    Raises:
        ValueError: no argument is annotated so, or a named one does not exist.
    """
    if cls is None:
        return functools.partial(support_torch_compile, dynamic_arg_dims=dynamic_arg_dims)
    dims = dynamic_arg_dims or infer_dynamic_arg_dims(cls.forward)
    unknown = set(dims) - set(inspect.signature(cls.forward).parameters)
    if unknown:
        raise ValueError(f"dynamic_arg_dims: {cls.__name__}.forward has no argument {sorted(unknown)[0]!r}")
    cls.dynamic_arg_dims = dims
    if not issubclass(cls, TorchCompileWrapperWithCustomDispatcher):
        cls.__bases__ = (*cls.__bases__, TorchCompileWrapperWithCustomDispatcher)
    original_init = cls.__init__
    accepted = inspect.signature(original_init).parameters

    @functools.wraps(original_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = next((kwargs[name] for name in _CONFIG_ARGUMENTS if kwargs.get(name) is not None), None)
        for name in _CONFIG_ARGUMENTS:
            if name not in accepted:
                kwargs.pop(name, None)
        original_init(self, *args, **kwargs)
        self.set_up_compilation(config or get_current_atom_config(), get_current_rank())

    original_call = cls.__call__  # with the hooks of nn.Module, which compiled code leaves out

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.do_not_compile:
            return original_call(self, *args, **kwargs)
        return self.call_compiled(args, kwargs)

    cls.__init__ = __init__
    cls.__call__ = __call__
    return cls


def infer_dynamic_arg_dims(forward: Callable[..., Any]) -> dict[str, int | list[int]]:
    """Dimension 0 of every argument annotated as a tensor. Raises ValueError if there is none."""
    dims: dict[str, int | list[int]] = {}
    for name, parameter in inspect.signature(forward).parameters.items():
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else _type_text(annotation)
        if _TENSOR.fullmatch(text.replace(" ", "").replace("typing.", "")):
            dims[name] = 0
    if not dims:
        raise ValueError(
            f"{forward.__qualname__}: no argument is annotated as torch.Tensor; name the dynamic ones in "
            "dynamic_arg_dims"
        )
    return dims


def _type_text(annotation: Any) -> str:
    arguments = [a for a in typing.get_args(annotation) if a is not type(None)]
    if len(arguments) == 1 and type(None) in typing.get_args(annotation):
        annotation = arguments[0]
    return getattr(annotation, "__name__", str(annotation))


def _dynamic_tensors(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """The tensors of a call, each with its argument's name and a dimension that varies."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    for name, dims in module.dynamic_arg_dims.items():
        value = bound.arguments.get(name)
        # IntermediateTensors hold their members in ``tensors``.
        members = [value] if isinstance(value, torch.Tensor) else getattr(value, "tensors", {}).values()
        for tensor in members:
            for dim in [dims] if isinstance(dims, int) else dims:
                yield name, tensor, dim % tensor.dim()


def _kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What compiled code depends on besides sizes: which arguments are given, dtypes, numbers and strings."""
    kind = [x.dtype if isinstance(x, torch.Tensor) else _value_or_type(x) for x in args]
    for name in sorted(kwargs) if kwargs else ():
        value = kwargs[name]
        kind += (name, value.dtype if isinstance(value, torch.Tensor) else _value_or_type(value))
    return tuple(kind)


def _value_or_type(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value)


def _names_used(code: types.CodeType) -> set[Any]:
    """Names that the instructions of ``code`` use; ``co_names`` also has those of the code that it replaces."""
    return {step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")}
