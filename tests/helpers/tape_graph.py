"""Device graphs for the CPU: segments of aten calls, replayed into the tensors that they were recorded with."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atom.utils.recording import GraphBackend, SegmentGraph

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class TapeGraph(SegmentGraph):
    """As on a device, capturing computes nothing: what a captured call returns is poisoned until the replay."""

    def __init__(self, backend):
        self.backend = backend
        self.calls = []
        self.num_replays = 0

    def begin(self):
        assert self.backend.tape is None, "captures do not nest"
        self.backend.tape = self

    def end(self):
        assert self.backend.tape is self
        self.backend.tape = None

    def abort(self):
        self.backend.tape = None
        self.backend.num_aborted += 1

    def replay(self):
        assert self.backend.tape is None, "no replay while capturing"
        self.num_replays += 1
        for function, args, kwargs, outputs in self.calls:
            results = function(*args, **kwargs)
            for result, output in zip(as_list(results), outputs, strict=True):
                if result.data_ptr() != output.data_ptr():
                    output.copy_(result)


class TapeBackend(GraphBackend, TorchDispatchMode):
    """Use as ``monkeypatch.setattr(region_graph, "new_recording", backend.new_recording)``."""

    def __init__(self):
        TorchDispatchMode.__init__(self)
        self.tape = None
        self.graphs = []
        self.num_sessions = 0
        self.num_aborted = 0

    def new_graph(self):
        self.graphs.append(TapeGraph(self))
        return self.graphs[-1]

    @contextmanager
    def session(self):
        self.num_sessions += 1
        with self:
            yield

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if self.tape is None or name in ALLOCATIONS:
            return function(*args, **kwargs)
        if name == "_local_scalar_dense":
            raise RuntimeError("a value of the device was asked for while capturing")
        if function._schema.is_mutable:
            result = next(
                (kwargs[a.name] if a.kwarg_only else args[i])
                for i, a in enumerate(function._schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write
            )
            self.tape.calls.append((function, args, kwargs, [result]))
            return result
        result = function(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for output in as_list(result):
            if output.untyped_storage().data_ptr() not in given:
                output.fill_(float("nan") if output.is_floating_point() else 0)
        self.tape.calls.append((function, args, kwargs, as_list(result)))
        return result


def as_list(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]
