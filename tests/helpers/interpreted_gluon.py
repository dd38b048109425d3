"""Gluon kernels of ours run by Triton's interpreter: layouts are left out, shared memory is a numpy array.

Layouts name where elements lie, never their values. Shared memory begins as NaN; copies to it arrive when they are
waited for, no earlier, and until then their target is NaN. A product of tensor cores is a product in fp32.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from atom.kernels.triton import fused_attention_launch

IMPORTS = {
    "from triton.experimental import gluon\n": "import triton as gluon\n",
    "from triton.experimental.gluon import language as gl\n": (
        "import triton.language as tl\nfrom tests.helpers.interpreted_gluon import language as gl\n"
    ),
    "from triton.experimental.gluon.language.nvidia.ampere import": "from tests.helpers.interpreted_gluon import",
    "from triton.language import debug_barrier": "from tests.helpers.interpreted_gluon import debug_barrier",
}


def interpreted(module, folder: Path):
    """``module`` with its Gluon functions as Triton functions, written to ``folder``."""
    source = Path(module.__file__).read_text()
    for theirs, ours in IMPORTS.items():
        assert theirs in source, f"{module.__name__} does not import Gluon as expected"
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

    def allocate_shared_memory(self, dtype, shape, layout):
        return Shared(np.full([_number(n) for n in shape], np.nan, _numpy_dtype(dtype)), dtype)


def debug_barrier():
    """Programs run one after the other, each as one thread."""


def _no_layout(*args, **options):
    return None


def _numpy_dtype(dtype):
    return {"fp16": np.float16, "fp32": np.float32}[str(getattr(dtype, "value", dtype))]


def mma_v2(a, b, acc):
    product = np.matmul(a.handle.data.astype(np.float32), b.handle.data.astype(np.float32))
    assert product.shape == acc.handle.data.shape
    return _tensor(product + acc.handle.data, tl.float32)


language = _Language()
async_copy = _Copies()
