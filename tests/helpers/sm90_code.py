"""Compiles recorded launches for sm_90 without a device, and asks NVIDIA's tools what came of it."""

import os
import re
import subprocess
import tempfile

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compiled(launch):
    """The kernel of a ``Launch``, specialised for its arguments as a launch on a device would be."""
    kernel, given = launch.kernel, launch.arguments
    is_gluon = isinstance(kernel, GluonJITFunction)
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int | float):
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            layout = f",{value.layout!r}" if is_gluon else ""
            signature[name] = f"tensordesc<bf16{value.block_shape}{layout}>"
    source = (GluonASTSource if is_gluon else ASTSource)(kernel, signature, constants, aligned)
    return triton.compile(source, target=TARGET, options=launch.launch_options)


def run_tool(binary, *command):
    """What one of the tools beside Triton's compiler says of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        name, *options = command
        return subprocess.run(
            [os.path.join(TOOLS, name), *options, cubin.name], capture_output=True, text=True, check=True
        ).stdout


def resources(binary):
    """Registers of a thread, bytes that it spills, bytes of shared memory, 16-byte loads in the code."""
    usage = run_tool(binary, "cuobjdump", "--dump-resource-usage")
    return {
        "registers": max(map(int, re.findall(r"REG:(\d+)", usage))),
        "spilled": max(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "shared": binary.metadata.shared,
        "wide": count_wide_loads(binary.asm["ptx"]),
    }


def count_wide_loads(ptx):
    return len(re.findall(r"ld\.global[.\w:]*v4|cp\.async\.[^;]*0x10", ptx))
