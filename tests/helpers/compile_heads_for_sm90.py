"""Compiles the sm_90 kernel of query, key and value heads as it is launched; prints what the machine code needs."""

import json

import torch

from atom.kernels.triton import head_projection
from atom.kernels.triton.compile_ahead import recording
from tests.helpers.sm90_code import compiled, resources, run_tool

LAYERS = {"normed": (16, 8, 128, True), "half as wide": (32, 8, 64, False)}  # heads, kv heads, dim, has norms


def launch_of(num_heads, kv, dim, has_norm):
    half = {"dtype": torch.bfloat16}
    weight = torch.zeros((num_heads + 2 * kv) * dim, 256, **half)
    output = torch.zeros(300, num_heads + 2 * kv, dim, **half)
    cos, sin = torch.zeros(2, 300, 1, dim, **half)
    keys, values = torch.zeros(2, 9, kv, 16, dim, **half)
    norm = torch.ones(num_heads + kv, dim) if has_norm else None
    with recording() as recorder:
        head_projection.launch(
            torch.zeros(300, 256, **half), weight, output, num_heads, cos, sin, norm, 1e-6, keys, values,
            torch.zeros(300, dtype=torch.int64),
        )  # fmt: skip
    (launch,) = recorder.launches.values()
    return launch


def facts(binary):
    code = run_tool(binary, "nvdisasm", "-c")
    products = {"products": code.count("HGMMA"), "wide_stores": code.count("STG.E.128")}
    return resources(binary) | products | {"warps": binary.metadata.num_warps}


print(json.dumps({name: facts(compiled(launch_of(*layer))) for name, layer in LAYERS.items()}))
