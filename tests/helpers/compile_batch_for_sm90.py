"""Compiles the sm_90 kernel of products for batches as it is launched; prints what the machine code looks like."""

import json
import re

import torch

from atom.kernels.triton.batch_linear import batch_shape, launch
from atom.kernels.triton.compile_ahead import recording
from tests.helpers.sm90_code import compiled, resources, run_tool

LINE = re.compile(r"HGMMA\.64x128x16|WARPGROUP\.DEPBAR|UTMALDG|UTMASTG")


def facts():
    """Of a gated layer of Llama-8B with 256 tokens, and everything in it smaller."""
    x, weight = torch.zeros(256, 512).bfloat16(), torch.zeros(512, 512).bfloat16()
    shape = batch_shape(28672, 4096, True, 256)
    with recording() as recorder:
        launch(shape, x, weight, torch.zeros(256, 256).bfloat16(), "silu")
    (recorded,) = recorder.launches.values()
    binary = compiled(recorded)
    order = LINE.findall(run_tool(binary, "nvdisasm", "-c"))
    return {
        "products": order.count("HGMMA.64x128x16"),
        "waits": order.count("WARPGROUP.DEPBAR"),
        "copies": order.count("UTMALDG"),
        "stores": order.count("UTMASTG"),
        "warps": binary.metadata.num_warps,
    } | resources(binary)


print(json.dumps(facts()))
