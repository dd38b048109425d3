"""Compiles every Triton kernel for sm_90 in a process that is not under the interpreter; prints what it found."""

import json
import os
import re
import subprocess
import sys
import tempfile

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from atom.kernels.triton import decode_attention, kv_cache, varlen_attention

D = sys.argv[1]
HALF, I32, I64, F32 = "*" + D, "i32", "i64", "fp32"
ATTENTION = dict(
    HAS_SINKS=False, HAS_SOFT_CAP=False, HAS_ROWS=True, KV_HEADS=8, PAGE=16, DIM=128, DIM_PAD=128
)
DECODE = dict(ATTENTION, WINDOW=0, GROUP=4, GROUP_PAD=16, TILE=64, SPLITS=4)
decode_types = dict(
    q=HALF,
    keys=HALF,
    values=HALF,
    tables="*i32",
    rows="*i64",
    context_lens="*i32",
    output=HALF,
    partial="*fp32",
    stats="*fp32",
    scale=F32,
    soft_cap=F32,
    q_token=I32,
    q_head=I32,
    table_stride=I32,
)
varlen_types = dict(
    q=HALF,
    keys=HALF,
    values=HALF,
    tables="*i32",
    rows="*i64",
    cu_seqlens_q="*i32",
    context_lens="*i32",
    cu_tiles="*i32",
    output=HALF,
    scale=F32,
    soft_cap=F32,
    num_seqs=I32,
    num_tokens=I32,
    q_token=I32,
    q_head=I32,
    table_stride=I32,
)
CASES = {
    "write_kv": (
        kv_cache._write_kv,
        dict(
            k=HALF,
            v=HALF,
            keys=HALF,
            values=HALF,
            slots="*i64",
            k_token=I32,
            k_head=I32,
            v_token=I32,
            v_head=I32,
        ),
        dict(NUM_HEADS=8, PAGE=16, DIM=128, HEADS_PAD=8, DIM_PAD=128),
        dict(num_warps=4),
    ),
    "decode": (
        decode_attention._decode,
        decode_types,
        dict(DECODE, sinks=None),
        dict(num_warps=4, num_stages=3),
    ),
    "combine": (
        decode_attention._combine,
        dict(partial="*fp32", stats="*fp32", context_lens="*i32", output=HALF),
        dict(sinks=None, HAS_SINKS=False, NUM_HEADS=32, DIM=128, DIM_PAD=128, SPLITS=4),
        dict(num_warps=1),
    ),
    "varlen": (
        varlen_attention._varlen,
        varlen_types,
        dict(ATTENTION, sinks=None, WINDOW=0, NUM_HEADS=32, TILE_Q=64, TILE_K=64),
        dict(num_warps=4, num_stages=3),
    ),
}
if D == "bf16":
    for name in ("decode", "varlen"):
        kernel, types, constants, options = CASES[name]
        CASES[name + "_gemma"] = (
            kernel,
            types,
            dict(
                constants,
                DIM=256,
                DIM_PAD=256,
                KV_HEADS=1,
                WINDOW=512,
                **({"TILE": 32} if name == "decode" else {"TILE_K": 32, "NUM_HEADS": 4}),
            ),
            dict(num_warps=4 if name == "decode" else 8, num_stages=2),
        )
tool = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin", "cuobjdump")
found = {}
for name, (kernel, types, constants, options) in CASES.items():
    names = kernel.arg_names
    signature = {n: types.get(n, "constexpr") for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, t in types.items()
        if t.startswith("*") or n.endswith(("_token", "_head"))
    }
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    found[name] = {
        "registers": max(map(int, re.findall(r"REG:(\d+)", usage))),
        "spilled": max(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "wide": len(re.findall(r"ld\.global[.\w:]*v4|cp\.async\.[^;]*0x10", compiled.asm["ptx"])),
        "shared": compiled.metadata.shared,
        "specialised": [
            p.name for p in kernel.params if p.name.startswith("num_") and not p.do_not_specialize
        ],
    }
print(json.dumps(found))
