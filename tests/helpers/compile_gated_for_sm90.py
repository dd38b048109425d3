"""Compiles the sm_90 kernel of gated products as it is launched; prints what the machine code looks like."""

import json
import re

import torch

from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.gated_linear import SHAPE, launch
from tests.helpers.sm90_code import compiled, resources, run_tool

LINE = re.compile(r"HGMMA\.\S+|WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]|UTMALDG|UTMASTG|^\.L_x_\d+:", re.MULTILINE)


def facts():
    x, weight = torch.zeros(300, 512).bfloat16(), torch.zeros(512, 512).bfloat16()
    with recording() as recorder:
        launch(SHAPE, x, weight, torch.zeros(300, 256).bfloat16(), "silu")
    (recorded,) = recorder.launches.values()
    binary = compiled(recorded)
    order = LINE.findall(run_tool(binary, "nvdisasm", "-c"))
    products = [line for line in order if line.startswith("HGMMA")]
    return {
        "products": len(products),
        "wide_products": sum(line.startswith("HGMMA.64x256x16") for line in products),
        # What the assembler serialises has a wait behind each product.
        "waits": sum(line.startswith("WARPGROUP") for line in order),
        "copies": order.count("UTMALDG"),
        "stores": order.count("UTMASTG"),
        "warps": binary.metadata.num_warps,
    } | resources(binary)


print(json.dumps(facts()))
