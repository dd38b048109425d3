"""Modules that a library imports and this process never looks into: executed at the first look, if there is one.

``import torch`` executes 1,100 modules, a third of them for exporting, quantising and compiling models. A deferred
module is an ordinary entry of ``sys.modules`` with an empty namespace; the first attribute that is asked of it
executes it, and it is an ordinary module from then on.
"""

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Asked of every module there is, by the import system or while a warning or a traceback is made: no look into it.
_ASKED_OF_ALL = frozenset({"__path__", "__file__", "__cached__", "__warningregistry__", "__wrapped__"})
_lock = threading.RLock()


class DeferredModule(ModuleType):
    """A module that executes itself when an attribute is missed."""

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED_OF_ALL:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        execute(self)
        return getattr(self, name)


class _ExecutingModule(ModuleType):
    """A deferred module on its way: other threads wait, its own sees what is there so far."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if type(self) is _ExecutingModule:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} yet")
        return getattr(self, name)


def execute(module: ModuleType) -> None:
    """Execute a deferred module now; nothing for any other, or while it is being executed by this thread."""
    with _lock:
        if type(module) is not DeferredModule:
            return
        loader = module.__spec__.loader
        module.__class__, after = _ExecutingModule, DeferredModule  # a module that fails is tried again
        try:
            loader.exec_module(module)
            after = ModuleType
        finally:
            module.__class__ = after


class _DeferringLoader(Loader):
    """Makes the module and leaves the rest to ``loader``, later."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader


class _Finder(MetaPathFinder):
    def __init__(self, names: Collection[str], needed_by: Collection[str]):
        self._names = frozenset(names)
        self._needed_by = frozenset(needed_by)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self._needed_by:
            execute_all()
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


def deferred_modules() -> Iterator[DeferredModule]:
    """Those that nobody has looked into."""
    for module in list(sys.modules.values()):
        if type(module) is DeferredModule:
            yield module


def execute_all() -> None:
    """Execute every deferred module that is left."""
    for module in deferred_modules():
        execute(module)


@contextmanager
def deferring(names: Collection[str], needed_by: Collection[str] = ()) -> Iterator[None]:
    """Defer the modules ``names`` that are imported first inside this context.

    Args:
        names: full names. They must not be needed for what they do while they are executed.
        needed_by: modules that do need that: importing one of them, whenever, executes all that is deferred first.
    """
    deferrer, watch = _Finder(names, needed_by), _Finder((), needed_by)
    sys.meta_path.insert(0, deferrer)
    try:
        yield
    finally:
        sys.meta_path[sys.meta_path.index(deferrer)] = watch
