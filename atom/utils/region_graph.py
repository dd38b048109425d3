"""Recorded graphs of a forward pass, by token count (``TokenGraph``) or by request bucket (``ReqGraph``).

A model's recording unit is marked ``@token_graph``; ops whose launch depends on the step's host data are marked
``@eager_region`` and break a token graph. How one recording works is in ``atom.utils.recording``.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable, Hashable, Iterator
from functools import wraps
from typing import Any, Literal, TypeVar

import torch

from atom.utils import recording
from atom.utils.device_graph import CudaBackend
from atom.utils.forward_context import get_forward_context
from atom.utils.python_recording import HostPool, PythonRecording
from atom.utils.recorded_values import deliver, map_tensors, tensors_in
from atom.utils.recording import GraphRecording, Recording

Phase = Literal["prefill", "decode"]
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_pools: dict[str, Any] = {}
_backends: dict[torch.device, CudaBackend] = {}


def graph_pool(device_type: str | None = None) -> Any:
    """The memory pool that every recording of this process shares, made at the first call.

    Recordings are never in use together and an output is consumed before the next replay, so the pool is as large
    as the largest recording. On a device it is the handle of ``torch.cuda.graph_pool_handle``, without one a
    ``HostPool``. ``device_type`` None: the device's if this process uses one.
    """
    kind = device_type or _default_device().type
    if kind not in _pools:
        _pools[kind] = torch.cuda.graph_pool_handle() if kind == "cuda" else HostPool()
    return _pools[kind]


def _new_device_pool() -> Any:
    _pools.pop("cuda", None)
    return graph_pool("cuda")


def _reset_graph_pool() -> None:
    """Forget the pool: later recordings use a new one. For tests."""
    _pools.clear()
    _backends.clear()


def _default_device() -> torch.device:
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def new_recording(name: str, device: torch.device, owner: object, breaks: bool) -> Recording:
    """An empty recording for ``device``. ``owner`` groups those that are never in use together."""
    if device.type != "cuda":
        return PythonRecording(name, graph_pool(device.type), owner, breaks)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _backends:
        _backends[device] = CudaBackend(device, graph_pool("cuda"), _new_device_pool)
    return GraphRecording(name, _backends[device], breaks)


def eager_region(function: F | None = None, *, when: Callable[..., bool] | None = None) -> Any:
    """Mark a function whose launches depend on the step's host data: a token graph breaks at it.

    Between the segments it runs on the live step's metadata, which it reads from the forward context. Its tensor
    arguments are those of the recording, by address; it writes into them or returns tensors of the recorded
    shapes. Tensors that a segment made must come as arguments, not by a closure. Other values are baked in.

    The function is called as it is, by the implementation of a custom op for instance; it is not for tracing.

    Args:
        when: asked at each call with the call's arguments; where it is false the call is recorded like any other.
    """
    if function is None:
        return lambda marked: eager_region(marked, when=when)
    if when is None:

        @wraps(function)
        def region(*args: Any, **kwargs: Any) -> Any:
            if recording.active is None:
                return function(*args, **kwargs)
            return recording.active.run_region(function, args, kwargs)

    else:

        @wraps(function)
        def region(*args: Any, **kwargs: Any) -> Any:
            if recording.active is None or not when(*args, **kwargs):
                return function(*args, **kwargs)
            return recording.active.run_region(function, args, kwargs)

    return region


def break_recording(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` as an eager region, for callers that decide at run time whether it is one."""
    if recording.active is None:
        return function(*args, **kwargs)
    return recording.active.run_region(function, args, kwargs)


class TokenGraph:
    """The recordings of one unit, by token bucket: rows of its first tensor argument.

    A recording serves prefill and decode of that many tokens alike, unless the unit is ``per_phase``. It counts as
    a phase's bucket once that phase's record pass asked for it.
    """

    def __init__(self, name: str = "token graph", per_phase: bool = False) -> None:
        self.name = name
        self.per_phase = per_phase
        self._recordings: dict[Hashable, tuple[Recording, tuple[Any, ...], dict[str, Any]]] = {}
        self._asked: dict[str, list[int]] = {"prefill": [], "decode": []}

    def _key(self, num_rows: int, phase: Phase) -> Hashable:
        return (num_rows, phase) if self.per_phase else num_rows

    def captured_sizes(self, phase: Phase) -> tuple[int, ...]:
        """Buckets, ascending, that a step of ``phase`` pads to. Raises ValueError for an unknown phase."""
        if phase not in self._asked:
            raise ValueError(f"phase must be 'prefill' or 'decode', got {phase!r}")
        return tuple(self._asked[phase])

    @property
    def memory(self) -> dict[Hashable, int]:
        """Bytes that each recording added, by rows or ``(rows, phase)``, in the order of recording."""
        return {key: entry[0].memory for key, entry in self._recordings.items()}

    def recording(self, num_rows: int, phase: Phase) -> Recording:
        """Raises RuntimeError, naming what is recorded, when there is none."""
        return self._entry(num_rows, phase)[0]

    def _entry(self, num_rows: int, phase: Phase) -> tuple[Recording, tuple[Any, ...], dict[str, Any]]:
        entry = self._recordings.get(self._key(num_rows, phase))
        if entry is None:
            raise RuntimeError(
                f"{self.name} has no recording of {num_rows} rows for {phase}; it has "
                f"{sorted(map(str, self._recordings)) or 'none'}"
            )
        return entry

    def record(
        self, num_rows: int, phase: Phase, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Record ``function(*args, **kwargs)`` as a bucket of ``phase``, unless it is recorded already.

        The tensors in ``args`` and ``kwargs`` become the static inputs of the recording. The caller has run the
        function once before. Returns its result. Raises RuntimeError when recording fails; then nothing is kept.
        """
        sizes = self._asked[phase]
        if self._key(num_rows, phase) in self._recordings:
            result = self.replay(num_rows, phase, *args, **kwargs)
        else:
            made = new_recording(
                f"{self.name} [{num_rows} rows, {phase}]", _device_of(args, kwargs), self, breaks=True
            )
            static_args = map_tensors(made.hold_input, args)
            static_kwargs = map_tensors(made.hold_input, kwargs)
            result = made.record(lambda: function(*static_args, **static_kwargs))
            self._recordings[self._key(num_rows, phase)] = (made, static_args, static_kwargs)
        if num_rows not in sizes:
            insort(sizes, num_rows)
        return result

    def replay(self, num_rows: int, phase: Phase, *args: Any, **kwargs: Any) -> Any:
        """Run the bucket of ``num_rows`` on these inputs; its output dies at the next replay of any recording.

        Inputs that lie elsewhere than the recorded ones are copied there. Raises RuntimeError when there is no such
        recording, or an input's shape or plain value is not the recorded one.
        """
        made, static_args, static_kwargs = self._entry(num_rows, phase)
        deliver(args, static_args, "argument")
        if kwargs or static_kwargs:
            deliver(kwargs, static_kwargs, "keyword argument")
        return made.replay()

    def clear(self) -> None:
        """Drop every recording."""
        self._recordings.clear()
        for sizes in self._asked.values():
            sizes.clear()


def request_bucket(running_bs: int, max_seqlen_q: int) -> tuple[int, int]:
    """Key of a request graph: ``(running_bs, draft tokens each request verifies)``."""
    return running_bs, max_seqlen_q - 1


class ReqGraph:
    """Recordings of a whole forward pass, one graph each, by key; for a target model by ``request_bucket``.

    Eager regions do not break them: the bucket fixes every launch, and a builder writes the step's metadata into
    the buffers that were recorded.
    """

    def __init__(self, name: str = "request graph", device: torch.device | None = None) -> None:
        self.name = name
        self._device = device
        self._recordings: dict[Hashable, Recording] = {}

    def record(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Record ``function`` under ``key`` and return its result; the caller has run it once before.

        Raises RuntimeError when the key is recorded already, or recording fails.
        """
        if key in self._recordings:
            raise RuntimeError(f"{self.name} has recorded {key} already")
        made = new_recording(f"{self.name} {key}", self._device or _default_device(), self, breaks=False)
        result = made.record(function)
        self._recordings[key] = made
        return result

    def replay(self, key: Hashable) -> Any:
        """Run it again; its outputs die at the next replay of any recording. Raises RuntimeError: no such key."""
        return self.recording(key).replay()

    def recording(self, key: Hashable) -> Recording:
        made = self._recordings.get(key)
        if made is None:
            raise RuntimeError(
                f"{self.name} has no recording of {key}; it has {list(self._recordings) or 'none'}"
            )
        return made

    def outputs(self, key: Hashable) -> Any:
        """What ``replay`` returns; of undefined content before it."""
        return self.recording(key).outputs

    def sizes(self, max_seqlen_q: int = 1) -> tuple[int, ...]:
        """Ascending request counts recorded for that query length, where keys are request buckets."""
        drafts = max_seqlen_q - 1
        return tuple(
            sorted(key[0] for key in self._recordings if isinstance(key, tuple) and key[1] == drafts)
        )

    @property
    def memory(self) -> dict[Hashable, int]:
        """Bytes that each recording added, by key, in the order of recording."""
        return {key: made.memory for key, made in self._recordings.items()}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recordings

    def __len__(self) -> int:
        return len(self._recordings)

    def clear(self) -> None:
        """Drop every recording."""
        self._recordings.clear()


def token_graph(per_phase: bool = False) -> Callable[[C], C]:
    """Class decorator: this module is a recording unit, the outermost one that holds all work per token.

    A call does what ``ForwardContext.tr_graph`` says: None calls the module, "record" records the bucket of its
    rows for the step's phase, "replay" replays it. The unit must be called with exactly a bucket's rows. It stands
    above any decorator that replaces ``__call__``. Units inside a unit that is being recorded are plain modules.

    Args:
        per_phase: prefill and decode run different work, so each phase is recorded for itself.
    """
    if not isinstance(per_phase, bool):
        raise TypeError("write @token_graph(), with parentheses")

    def mark(cls: C) -> C:
        call = cls.__call__

        @wraps(call)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            context = get_forward_context()
            if context.tr_graph is None or recording.active is not None:
                return call(self, *args, **kwargs)
            phase: Phase = "prefill" if context.context.is_prefill else "decode"
            graphs, num_rows = token_graph_of(self), _num_rows(self, args, kwargs)
            if context.tr_graph == "replay":
                return graphs.replay(num_rows, phase, *args, **kwargs)
            unit = weakref.ref(self)  # a recording that runs the module again must not keep it alive
            prepare = context.prepare

            def run(*args: Any, **kwargs: Any) -> Any:
                if prepare is not None:
                    prepare()
                return call(unit(), *args, **kwargs)

            return graphs.record(num_rows, phase, run, *args, **kwargs)

        cls.__call__ = __call__
        cls.is_token_graph_per_phase = per_phase
        return cls

    return mark


def token_graph_of(unit: Any) -> TokenGraph:
    """The recordings of a marked module. Raises TypeError for a module that is not marked."""
    graphs = unit.__dict__.get("token_graph_")
    if graphs is None:
        per_phase = getattr(type(unit), "is_token_graph_per_phase", None)
        if per_phase is None:
            raise TypeError(f"{type(unit).__name__} is not marked @token_graph()")
        graphs = unit.__dict__["token_graph_"] = TokenGraph(type(unit).__name__, per_phase)
    return graphs


def token_graphs(model: torch.nn.Module) -> list[TokenGraph]:
    """Those of the model's recording units; a unit inside a unit has none of its own."""
    return [token_graph_of(unit) for unit in _outermost_units(model)]


def _outermost_units(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if hasattr(type(module), "is_token_graph_per_phase"):
        yield module
    else:
        for child in module.children():
            yield from _outermost_units(child)


def _num_rows(unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.shape[0]
    raise TypeError(f"{type(unit).__name__} was called without a tensor argument: nothing says how many rows")


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = tensors_in((args, kwargs))
    return tensors[0].device if tensors else _default_device()
