"""Compiles the sm_90 kernel of gated products as it is launched; prints what the machine code looks like."""

import json
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import torch

from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.gated_linear import SHAPE, TALL, launch
from tests.helpers.sm90_code import compiled, resources, run_tool

LINE = re.compile(r"HGMMA\.\S+|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d|UTMALDG|UTMASTG|^\.L_x_\d+:", re.MULTILINE)


def facts(shape):
    x, weight = torch.zeros(300, 512).bfloat16(), torch.zeros(512, 512).bfloat16()
    with recording() as recorder:
        launch(shape, x, weight, torch.zeros(300, 256).bfloat16(), "silu")
    (recorded,) = recorder.launches.values()
    binary = compiled(recorded)
    order = LINE.findall(run_tool(binary, "nvdisasm", "-c"))
    return {
        "products": Counter(line for line in order if line.startswith("HGMMA")),
        # What the assembler serialises has a wait behind each product.
        "waits": sum(line.startswith("WARPGROUP") for line in order),
        "copies": order.count("UTMALDG"),
        "stores": order.count("UTMASTG"),
        "warps": binary.metadata.num_warps,
    } | resources(binary)


if __name__ == "__main__":
    shapes = (SHAPE, TALL)
    with ProcessPoolExecutor() as pool:
        print(json.dumps(dict(zip((shape.groups for shape in shapes), pool.map(facts, shapes), strict=True))))
