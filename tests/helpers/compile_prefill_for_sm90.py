"""Compiles the sm_90 kernels of prefill attention as they are launched; prints what the machine code looks like."""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from atom.kernels.triton import varlen_hopper
from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.varlen_attention import TileShape, varlen_attention

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
TOOLS = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")
LINE = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]|MUFU\.EX2|HGMMA|UTMALDG")


def launch_of(shape, num_heads, num_kv_heads, dim):
    packed = torch.randn(300, num_heads + 2 * num_kv_heads, dim).bfloat16()
    q, k, v = packed.split((num_heads, num_kv_heads, num_kv_heads), 1)
    keys, values = torch.zeros(2, 9, num_kv_heads, 16, dim, dtype=torch.bfloat16)
    assert varlen_hopper.fits(q, k, v, keys, values)
    table = torch.zeros(1, 20, dtype=torch.int32)
    cu_seqlens, lens = torch.tensor([0, 300], dtype=torch.int32), torch.tensor([300], dtype=torch.int32)
    with recording() as recorder:
        varlen_attention(
            q, k, v, keys, values, table, None, cu_seqlens, lens, torch.empty_like(q), scale=0.1, shape=shape
        )
    return list(recorder.launches.values())[-1]


def compiled(launch):
    kernel, given = launch.kernel, launch.arguments
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int | float):
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        else:
            signature[name] = f"tensordesc<bf16{value.block_shape},{value.layout!r}>"
    source = GluonASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.launch_options)


def facts(binary):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        command = [os.path.join(TOOLS, "nvdisasm"), "-c", cubin.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    order = LINE.findall(code)
    waits = [i for i, line in enumerate(order) if line.endswith("0x1")]
    return {
        "products": order.count("HGMMA"),
        "copies": order.count("UTMALDG"),
        # Exponentials between the wait for the scores and that for the values: those run beside a product.
        "overlapped": [order[i + 1 :].index("WARPGROUP.DEPBAR.LE gsb0, 0x0") for i in waits],
        "shared": binary.metadata.shared,
        "warps": binary.metadata.num_warps,
    }


CASES = {
    "specialised": (TileShape(128, 128, 12, 2, True, "specialised"), 32, 8, 128),
    "plain": (TileShape(128, 128, 8, 2, True, "plain"), 32, 8, 64),
}
print(json.dumps({name: facts(compiled(launch_of(*CASES[name]))) for name in sys.argv[1:]}))
