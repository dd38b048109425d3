"""Compiles the sm_90 kernel of prefill attention as it is launched; prints what the machine code looks like."""

import json
import re

import torch

from atom.kernels.triton import varlen_hopper
from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.varlen_attention import HOPPER_SHAPE, varlen_attention
from tests.helpers.sm90_code import compiled, run_tool

HEADS = ((32, 8, 128), (32, 8, 64))  # query heads, kv heads, head dimension
LINE = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]|MUFU\.EX2|HGMMA|UTMALDG")


def launch_of(num_heads, num_kv_heads, dim):
    packed = torch.randn(300, num_heads + 2 * num_kv_heads, dim).bfloat16()
    q, k, v = packed.split((num_heads, num_kv_heads, num_kv_heads), 1)
    keys, values = torch.zeros(2, 9, num_kv_heads, 16, dim, dtype=torch.bfloat16)
    assert varlen_hopper.fits(q, k, v, keys, values)
    table = torch.zeros(1, 20, dtype=torch.int32)
    cu_seqlens, lens = torch.tensor([0, 300], dtype=torch.int32), torch.tensor([300], dtype=torch.int32)
    with recording() as recorder:
        varlen_attention(
            q, k, v, keys, values, table, None, cu_seqlens, lens, torch.empty_like(q), scale=0.1, shape=HOPPER_SHAPE
        )  # fmt: skip
    return list(recorder.launches.values())[-1]


def facts(binary):
    code = run_tool(binary, "nvdisasm", "-c")
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


print(json.dumps({f"{heads}": facts(compiled(launch_of(*heads))) for heads in HEADS}))
