"""Gluon kernels of ours run by Triton's interpreter: layouts are left out, shared memory is a numpy array.

Layouts name where elements lie, never their values. Shared memory begins as NaN; copies to it arrive when they are
waited for, no earlier, and until then their target is NaN. Barriers refuse a wait for bytes that nobody sends. A
product of tensor cores is a product in fp32.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from atom.kernels.triton import (
    decode_gemm_tile_gluon,
    decode_linear,
    fused_attention_launch,
    gluon_parts,
)

IMPORTS = {
    "from triton.experimental import gluon\n": "import triton as gluon\n",
    "from triton.experimental.gluon import language as gl\n": (
        "import triton.language as tl\nfrom tests.helpers.interpreted_gluon import language as gl\n"
    ),
}
OTHER_IMPORTS = {  # not of every kernel
    "from triton.experimental.gluon.language.nvidia.ampere import": "from tests.helpers.interpreted_gluon import",
    "from triton.experimental.gluon.language.nvidia.hopper import": "from tests.helpers.interpreted_gluon import",
    "from triton.language import debug_barrier": "from tests.helpers.interpreted_gluon import debug_barrier",
    "from atom.kernels.triton.gluon_parts import": "from interpreted_gluon_parts import",
}


def interpreted(module, folder: Path):
    """``module`` with its Gluon functions as Triton functions, written to ``folder``."""
    if module is not gluon_parts:
        parts = interpreted(gluon_parts, folder)
        sys.modules[parts.__name__] = parts
    source = Path(module.__file__).read_text()
    for theirs in IMPORTS:
        assert theirs in source, f"{module.__name__} does not import Gluon as expected"
    for theirs, ours in (IMPORTS | OTHER_IMPORTS).items():
        source = source.replace(theirs, ours)
    source = source.replace("gl.constexpr", "tl.constexpr")  # the interpreter knows it by this name
    path = folder / Path(module.__file__).name
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"interpreted_{path.stem}", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def use_gluon_kernels(monkeypatch, folder: Path):
    """Let decode attention run as on sm_90, through the interpreter where there is no device."""
    if not torch.cuda.is_available():
        for name in ("fused_attention_few_gluon", "fused_attention_batch_gluon"):
            kernels = interpreted(getattr(fused_attention_launch, name), folder)
            monkeypatch.setattr(fused_attention_launch, name, kernels)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for sm_90 alone")


def use_tile_kernel(monkeypatch, folder: Path):
    """Let tiles of a decode step's products run as on sm_90, through the interpreter where there is no device."""
    if not torch.cuda.is_available():
        module = interpreted(decode_gemm_tile_gluon, folder)
        module.gemm_tile = _InClusters(module)
        monkeypatch.setattr(decode_linear, "TensorDescriptor", Descriptor)
        monkeypatch.setattr(decode_linear, "decode_gemm_tile_gluon", module)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiled for sm_90 alone")


class _InClusters:
    """A kernel whose programs meet: each runs twice, and finds what all left the first time."""

    def __init__(self, module):
        self._kernel, self._rank = module.gemm_tile, 0
        module._rank = lambda pid: pid * 0 + self._rank
        module._store_of_each = lambda place, value, mask: tl.store(place, value, mask=mask)
        module._meet = lambda pid: None

    def __getitem__(self, grid):
        def launch(*args, num_ctas, **options):
            for turn in range(2 * num_ctas if num_ctas > 1 else 1):
                self._rank = turn % num_ctas
                self._kernel[grid](*args, **options)

        return launch


def _tensor(array, dtype):
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def _number(value):
    return (
        int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(getattr(value, "value", value))
    )


class Shared:
    """A view of shared memory."""

    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype

    @property
    def shape(self):
        return self.array.shape

    def index(self, place):
        return Shared(self.array[_number(place)], self.dtype)

    def slice(self, start, length, dim=0):
        place = [slice(None)] * self.array.ndim
        start = _number(start)
        assert start + _number(length) <= self.array.shape[dim]
        place[dim] = slice(start, start + _number(length))
        return Shared(self.array[tuple(place)], self.dtype)

    def permute(self, order):
        return Shared(self.array.transpose(order), self.dtype)

    def _keep_alive(self):
        """Nothing here shares memory."""

    def load(self, layout):
        return _tensor(self.array.copy(), self.dtype)

    def store(self, value):
        assert value.handle.data.shape == self.array.shape
        self.array[...] = value.handle.data


class _Copies:
    """``async_copy``: groups of copies on their way."""

    def __init__(self):
        self._open, self._groups = [], []

    def async_load(self, smem, pointer, mask=None):
        value = tl.load(pointer, mask=mask, other=0.0)
        assert value.handle.data.shape == smem.array.shape
        smem.array[...] = np.nan
        self._open.append((smem.array, value.handle.data))

    def commit_group(self):
        self._groups.append(self._open)
        self._open = []

    def wait_group(self, num_outstanding=0):
        while len(self._groups) > num_outstanding:
            for target, data in self._groups.pop(0):
                target[...] = data


class _Language:
    """``triton.experimental.gluon.language`` as far as ``triton.language`` has another form."""

    def __getattr__(self, name):
        return _no_layout if name.endswith("Layout") else getattr(tl, name)

    def arange(self, start, end, layout=None):
        return tl.arange(tl.constexpr(_number(start)), tl.constexpr(_number(end)))

    def full(self, shape, value, dtype, layout=None):
        return tl.full([_number(n) for n in shape], value, dtype)

    def store(self, place, value, mask=None):
        if mask is not None:  # a scalar spread over a mask comes as bytes
            mask.handle.data = mask.handle.data.astype(bool)
        tl.store(place, value, mask=mask)

    def zeros(self, shape, dtype, layout=None):
        return tl.zeros([_number(n) for n in shape], dtype)

    def convert_layout(self, value, layout):
        return value

    def allocate_shared_memory(self, dtype, shape, layout, value=None):
        kind = _numpy_dtype(dtype)
        nothing = np.nan if np.issubdtype(kind, np.floating) else 0
        shared = Shared(np.full([_number(n) for n in shape], nothing, kind), dtype)
        if value is not None:
            shared.store(value)
        return shared

    def barrier(self):
        """Programs run one after the other, each as one thread."""


def debug_barrier():
    """Programs run one after the other, each as one thread."""


def _no_layout(*args, **options):
    return None


def _numpy_dtype(dtype):
    return {"fp16": np.float16, "fp32": np.float32, "int64": np.int64}[str(getattr(dtype, "value", dtype))]


def mma_v2(a, b, acc):
    product = np.matmul(a.handle.data.astype(np.float32), b.handle.data.astype(np.float32))
    assert product.shape == acc.handle.data.shape
    return _tensor(product + acc.handle.data, tl.float32)


class Descriptor:
    """A tensor of fp16 that is brought by blocks; behind its end there are zeros."""

    dtype = tl.float16

    def __init__(self, base, shape, strides, block_shape, layout):
        assert list(base.stride()) == strides and base.dtype is torch.float16
        self.base = torch.as_strided(base, shape, strides)  # may go on behind its end, not behind its room's
        self.block_shape, self.layout = block_shape, layout

    def block(self, place):
        found = np.zeros(self.block_shape, np.float16)
        ranges = tuple(
            slice(at, at + size) for at, size in zip(map(_number, place), self.block_shape, strict=True)
        )
        data = self.base[ranges].numpy()
        found[tuple(slice(0, n) for n in data.shape)] = data
        return found


class _Barriers:
    """``mbarrier`` with one arrival, and the copies that arrive with its bytes; by where a barrier lies."""

    MBarrierLayout = staticmethod(lambda cga_layout: None)

    def __init__(self):
        self._states = {}

    def init(self, bar, count):
        assert _number(count) == 1
        self._states[self._at(bar)] = [0, None, []]  # phases that ended, bytes still expected, copies

    def expect(self, bar, num_bytes):
        state = self._states[self._at(bar)]
        assert state[1] is None, "the phase before has not ended"
        state[1] = _number(num_bytes)

    def wait(self, bar, phase):
        state = self._states[self._at(bar)]
        if state[0] % 2 == _number(phase):
            assert state[1] == 0, f"{state[1]} bytes are still expected"
            for target, data in state[2]:
                target[...] = data
            state[:] = [state[0] + 1, None, []]

    def bring(self, descriptor, place, bar, tile):
        state, data = self._states[self._at(bar)], descriptor.block(place)
        assert data.shape == tile.array.shape
        tile.array[...] = np.nan
        state[1] -= data.nbytes
        state[2].append((tile.array, data))

    def _at(self, bar):
        return bar.array.__array_interface__["data"][0]


class tma:
    """Of it what the kernels take that run here."""

    async_store = None  # none of them writes by it

    @staticmethod
    def async_load(descriptor, place, bar, tile):
        mbarrier.bring(descriptor, place, bar, tile)


def fence_async_shared():
    """Nothing is written here that another kind of access could miss."""


def warpgroup_mma(a, b, acc, is_async=False):
    product = np.matmul(a.array.astype(np.float32), b.array.astype(np.float32))
    assert product.shape == acc.handle.data.shape
    return _tensor(product + acc.handle.data, tl.float32)


def warpgroup_mma_wait(num_outstanding, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


language = _Language()
mbarrier = _Barriers()
async_copy = _Copies()
