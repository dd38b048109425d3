"""What a traced call depends on besides configuration and compiler, as JSON that is equal for equal calls.

Tracing bakes numbers, names and functions of a module into code. Whoever uses the code again without tracing has to
know that nothing of it has changed.
"""

import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

PLAIN = (type(None), bool, int, float, str)


def describe(value: Any, packages: Iterable[str], skip: Iterable[str] = ()) -> list[Any]:
    """Everything below ``value`` that tracing could bake into code, as JSON: equal for equal modules.

    Tensors count with layout, device, and which of them are one or share memory, not with their contents. Objects
    are opened if their class is of ``packages`` or a module; of others the type counts.

    Args:
        skip: attributes that do not count.
    """
    return _Description(frozenset(packages), frozenset(skip)).of(value)


class _Description:
    def __init__(self, packages: frozenset[str], skip: frozenset[str]):
        self._packages, self._skip = packages, skip
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._classes: dict[type, int] = {}
        self._kept: list[Any] = []  # ids are of living objects

    def of(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return [type(value).__name__, repr(value)]
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, torch.Tensor):
            return [name, self.tensor(value)]
        if isinstance(value, Mapping):
            return [name, [[self.of(key), self.of(item)] for key, item in value.items()]]
        if isinstance(value, (list, tuple)):
            return [name, [self.of(item) for item in value]]
        if isinstance(value, (set, frozenset)):
            return [
                name,
                sorted(repr(item) if isinstance(item, PLAIN) else str(type(item)) for item in value),
            ]
        if isinstance(value, functools.partial):
            return [name, self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return [name, self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            return [value.__module__, value.__qualname__, self.of(cells), self.of(value.__defaults__)]
        if isinstance(value, (torch.dtype, torch.device)):
            return [name, str(value)]
        if isinstance(value, type):
            return [name, f"{value.__module__}.{value.__qualname__}"]
        if isinstance(value, nn.Module) or name.partition(".")[0] in self._packages:
            members = [[key, self.of(item)] for key, item in self._members(value)]
            return [name, self._methods(type(value)), members]
        return [name, getattr(value, "__qualname__", getattr(value, "__name__", ""))]

    def _methods(self, cls: type) -> list[Any]:
        """Where the methods of ``cls`` stand: a patched class is another."""
        if cls in self._classes:
            return ["again", self._classes[cls]]
        self._classes[cls] = len(self._classes)
        own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in self._packages]
        found = [(name, item) for base in own for name, item in vars(base).items()]
        codes = [(name, item.__code__) for name, item in found if isinstance(item, types.FunctionType)]
        return [[name, code.co_filename, code.co_firstlineno] for name, code in codes]

    def _members(self, value: Any) -> Iterator[tuple[str, Any]]:
        slots = [slot for cls in type(value).__mro__ for slot in _names(vars(cls).get("__slots__", ()))]
        members = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
        members |= getattr(value, "__dict__", {})
        return ((key, item) for key, item in members.items() if key not in self._skip)

    def tensor(self, tensor: torch.Tensor, free: Sequence[int] = ()) -> list[Any]:
        """Layout of ``tensor``; the dimensions ``free`` may have any size."""
        sizes = [None if dim in free else size for dim, size in enumerate(tensor.shape)]
        facts = [str(tensor.dtype), str(tensor.device), type(tensor).__name__, tensor.requires_grad, sizes]
        try:
            stride = "contiguous" if tensor.is_contiguous() else list(tensor.stride())
            storage = tensor.untyped_storage()._cdata
            shared = self._storages.setdefault(storage, len(self._storages))
            return [*facts, stride, tensor.storage_offset(), shared]
        except (RuntimeError, NotImplementedError):  # a packed weight of a library's own layout
            return [*facts, str(tensor.layout)]


def _names(slots: Any) -> Sequence[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def describe_call(
    module: nn.Module,
    arguments: Mapping[str, Any],
    free: Mapping[str, Sequence[int]],
    skip: Iterable[str],
) -> list[Any]:
    """What a plan depends on besides configuration and compiler: the module and the bound ``arguments``.

    Args:
        free: the dimensions of tensor arguments that vary from call to call.
        skip: attributes of modules that do not count.
    """
    description = _Description(_packages(module), frozenset(skip))
    parts = [[type(module).__module__, type(module).__qualname__], description.of(module)]
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            parts.append([name, description.tensor(value, free.get(name, ()))])
        elif value is not module:
            parts.append([name, description.of(value)])
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str(torch.get_default_dtype())]
    return [*parts, modes, sorted(item for item in os.environ.items() if item[0].startswith("ATOM_"))]


def _packages(module: nn.Module) -> frozenset[str]:
    return frozenset({"atom", type(module).__module__.partition(".")[0]})


def source_files(module: nn.Module, traced: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the ``traced`` files and of every loaded file of ATOM and of the module's package.

    Constants that traced code imports come from files of which nothing was traced.
    """
    files, packages = set(traced), _packages(module)
    for name, loaded in list(sys.modules.items()):
        path = getattr(loaded, "__file__", None)
        if name.partition(".")[0] in packages and path and path.endswith(".py"):
            files.add(path)
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in sorted(files)}
