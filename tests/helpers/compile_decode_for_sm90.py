"""Compiles the kernels of a fused decode step for sm_90 as the measured shapes launch them; prints what it found."""

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
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from atom.benchmarks.decode_launches import SHAPES, launches_of, record_step

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}
TOOLS = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin")


def compiled(launch):
    kernel, given = launch.kernel, launch.arguments
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                aligned[(i,)] = [["tt.divisibility", 16]]
    source_class = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_class(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.launch_options)


def facts(binary):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        command = [os.path.join(TOOLS, "cuobjdump"), "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ptx = binary.asm["ptx"]
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    wide = r"ld\.global[.\w:]*v4|cp\.async\.[^;]*0x10"
    return {
        "registers": max(map(int, re.findall(r"REG:(\d+)", usage))),
        "spilled": max(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "shared": binary.metadata.shared,
        "wide": len(re.findall(wide, ptx)),
        "wide_before_wait": len(re.findall(wide, before)) if wait else 0,
        "waits": ptx.count("griddepcontrol.wait"),
        "starts_next_first": "griddepcontrol.launch_dependents" in before,
        "stores_before_wait": len(re.findall(r"st\.global|atom\.global", before)) if wait else 0,
        "barriers": ptx.count("bar.sync"),
    }


def record(recorder):
    for number, case in enumerate(sys.argv[1:]):
        name, num_tokens = case.split(":")
        shape = next(shape for shape in SHAPES if shape.name == name)
        record_step(recorder, shape, int(num_tokens))
        if number < 2:
            record_step(recorder, shape, int(num_tokens), has_gluon=False, cache_dtype=torch.float8_e4m3fn)


def main():
    found = {}
    for launch in launches_of(record):
        name = launch.kernel.fn.__name__
        found[f"{name} {launch.label} {launch.launch_options}"] = {"kernel": name, **facts(compiled(launch))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
