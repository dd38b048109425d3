"""Compiles the sm_90 kernel of products for batches as it is launched; prints what the machine code looks like."""

import json
import re

import torch

from atom.kernels.triton.batch_linear import Around, BatchShape, launch
from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.decode_parts import SILU
from tests.helpers.sm90_code import compiled, resources, run_tool

LINE = re.compile(r"HGMMA\.64x128x16|WARPGROUP\.DEPBAR|UTMALDG|UTMASTG|LDSM|ACQBULK")
SHAPE = BatchShape(64, 2, 128, 6, 128)  # of gated layers of Llama-8B with 256 tokens, among others


def zeros(*size, dtype=torch.bfloat16):
    return torch.zeros(size, dtype=dtype)


def facts(activation, **around):
    """Of a layer of 512 columns."""
    out = around.get("residual", zeros(256, 256 if activation else 512))
    with recording() as recorder:
        launch(SHAPE, zeros(256, 512), zeros(512, 512), out, activation, around=Around(**around))
    (recorded,) = recorder.launches.values()
    binary = compiled(recorded)
    order = LINE.findall(run_tool(binary, "nvdisasm", "-c"))
    return {
        "products": order.count("HGMMA.64x128x16"),
        "waits": order.count("WARPGROUP.DEPBAR"),
        "copies": order.count("UTMALDG"),
        "stores": order.count("UTMASTG"),
        "residuals": order.count("LDSM"),
        "waits for launches": order.count("ACQBULK"),
        "warps": binary.metadata.num_warps,
    } | resources(binary)


def main():
    shares = zeros(64, 256, dtype=torch.float32)
    norm = {"squares": shares, "num_shares": 64, "eps": 1e-6, "stride": 256}
    behind = {"next_norm": zeros(512), "next_x": zeros(256, 512), "next_squares": shares, "stride": 256}
    found = {
        "a prefill's": facts(SILU),
        "norm": facts(0, **norm),
        "norm + activation": facts(SILU, **norm),
        "residual + next": facts(0, residual=zeros(256, 512), **behind),
    }
    print(json.dumps(found))


main()
