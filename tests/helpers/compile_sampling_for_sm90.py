"""Compiles the sampling kernels for sm_90 for every kind of argument that a launch may have; prints what it saw.

With ``--all``, every combination; Triton compiles anew for numbers that are 1, multiples of 16 or 64 bits wide.
"""

import json
import sys
from itertools import product

import torch
from triton.runtime import driver

from atom.kernels.reference.sampling import Draw
from atom.kernels.triton import sampling
from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.compile_worker import KernelTarget, TargetDriver

driver.set_active(TargetDriver(KernelTarget("cuda", 90, 32)))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Ids of a row, and from one row to the next: 1, multiples of 16 or not, beyond 32 bits.
SHAPES = [(1, 1), (6, 6), (16, 16), (999, 1000), (5001, 5001), (151_669, 151_936), (262_144, 2**31 + 16)]
INTEGERS = [torch.int32, torch.int64]  # of top-k
KINDS = ["greedy", "random", "filtered"]
EVERY = list(product(DTYPES, SHAPES, INTEGERS, KINDS, [False, True]))
FEW = [
    (torch.float32, (6, 6), torch.int64, "filtered", False),
    (torch.bfloat16, (1, 1), torch.int32, "filtered", True),
    (torch.float16, (5001, 5001), torch.int32, "random", True),
    (torch.float16, (262_144, 2**31 + 16), torch.int32, "greedy", True),
]


def launch(dtype, shape, integer, kind, advances):
    """One step of three rows, on tensors without values."""

    def column(dtype=torch.float32, n=3):
        return torch.empty(n, dtype=dtype, device="meta")

    num_ids, stride = shape
    logits = torch.empty_strided((3, num_ids), (stride, 1), dtype=dtype, device="meta")
    long, int32 = torch.int64, torch.int32
    draw = Draw(column(), column(integer), column(), column(), column(long), column(long), kind == "filtered")
    tables = (column(long), column(int32), column(int32, 8), column(long, 8)) if advances else None
    sampling.sample(logits, None if kind == "greedy" else draw, tables)
    words = torch.empty(3, -(-num_ids // 32), dtype=int32, device="meta")
    sampling.mask_bits(logits, column(long), words)


with recording() as recorder:
    for case in EVERY if "--all" in sys.argv else FEW:
        launch(*case)
failures = []
for step in recorder.launches.values():
    try:
        step.compile()
    except Exception as error:
        failures.append(f"{step.kernel.fn.__name__} {step.positional}: {error}")
names = sorted({step.kernel.fn.__name__ for step in recorder.launches.values()})
print(json.dumps({"kernels": names, "launches": len(recorder.launches), "failures": failures}))
