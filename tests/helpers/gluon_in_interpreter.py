"""Gluon kernels under Triton's interpreter, which knows no layouts: they name where elements lie, never their values.

``interpreted(module)`` is the module's source with Gluon's names replaced by those of Triton. Shared memory is an
array that begins as NaN; a product of tensor cores is a sum of products in fp32.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_IMPORTS = {
    "from triton.experimental import gluon": "import triton.language as tl\nfrom {here} import gluon",
    "from triton.experimental.gluon import language as gl": "from {here} import gl",
    "from triton.experimental.gluon.language.nvidia.ampere import mma_v2": "from {here} import mma_v2",
    "from triton.language import debug_barrier": "from {here} import debug_barrier",
}


class SharedMemory:
    def __init__(self, array, element_type):
        self.array, self.element_type = array, element_type

    def store(self, value):
        self.array[...] = value.handle.data

    def load(self, layout):
        block = tl.block_type(self.element_type, list(self.array.shape))
        return tl.core.tensor(TensorHandle(self.array.copy(), self.element_type), block)

    def slice(self, start, length, dim=0):
        where = [np.s_[:]] * self.array.ndim
        where[int(dim)] = np.s_[int(start) : int(start) + int(length)]
        return SharedMemory(self.array[tuple(where)], self.element_type)

    def permute(self, order):
        return SharedMemory(self.array.transpose(order), self.element_type)


def _allocate(element_type, shape, layout):
    sizes = [int(n) for n in shape]
    number = {tl.float32: np.float32, tl.float16: np.float16}[element_type]
    return SharedMemory(np.full(sizes, np.nan, number), element_type)


def mma_v2(a, b, acc):
    wide = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
    return acc + tl.sum(wide, 1)


def debug_barrier():
    """Programs run one after the other, each as one thread."""
    return None


def _store(place, value, mask=None):
    if mask is not None:  # a scalar spread over a mask comes as bytes
        mask.handle.data = mask.handle.data.astype(bool)
    tl.store(place, value, mask=mask)


class gluon:
    jit = staticmethod(triton.jit)


class gl:
    """What our kernels use of ``triton.experimental.gluon.language``."""

    constexpr, float32, bfloat16, int64 = tl.constexpr, tl.float32, tl.bfloat16, tl.int64
    static_range = staticmethod(lambda *limits: range(*map(int, limits)))
    allocate_shared_memory = staticmethod(_allocate)
    BlockedLayout = SliceLayout = DotOperandLayout = staticmethod(lambda *args, **names: None)
    NVMMADistributedLayout = SwizzledSharedLayout = BlockedLayout
    arange = staticmethod(lambda start, end, layout=None: tl.arange(int(start), int(end)))
    zeros = staticmethod(lambda shape, dtype, layout=None: tl.zeros([int(n) for n in shape], dtype))
    full = staticmethod(
        lambda shape, value, dtype, layout=None: tl.full([int(n) for n in shape], value, dtype)
    )
    store = staticmethod(_store)
    convert_layout = staticmethod(lambda x, layout: x)


def _forward(name):
    return staticmethod(lambda *args, **names: getattr(tl, name)(*args, **names))


for _name in (
    "load", "atomic_add", "program_id", "where", "maximum", "minimum", "exp2", "rsqrt", "sum", "max",
    "expand_dims", "cdiv",
):  # fmt: skip
    setattr(gl, _name, _forward(_name))


def interpreted(module, folder: Path):
    """``module`` once more, from a file in ``folder``, its kernels run by the interpreter."""
    source = Path(module.__file__).read_text()
    for line, other in _IMPORTS.items():
        source = source.replace(f"{line}\n", other.format(here=__name__) + "\n")
    path = folder / f"{module.__name__.rpartition('.')[2]}_interpreted.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    spec.loader.exec_module(found)
    return found
