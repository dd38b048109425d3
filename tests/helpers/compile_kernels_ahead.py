"""Compiles kernels of a decode step for sm_90 in processes, then looks what this one finds; prints what it saw."""

import json
import sys

import torch
from triton import knobs
from triton.runtime import driver

from atom.benchmarks.decode_launches import empty, launches_of
from atom.kernels.triton import compile_ahead
from atom.kernels.triton.compile_worker import KernelTarget, TargetDriver
from atom.kernels.triton.decode_gemv_gluon import gemv_rows
from atom.kernels.triton.decode_linear import HeadBuffers, LinearArguments, head
from atom.kernels.triton.decode_step import choose, final_norm

driver.set_active(TargetDriver(KernelTarget("cuda", 90, 32)))


def record(recorder):
    norm, long = empty(256), {"dtype": torch.int64}
    for n in (1, 3):
        final_norm(empty(n, 256), norm, empty(n, 256), 1e-6, True)
        choose(empty(n, **long), empty(n, **long), empty(n, dtype=torch.bool), None, True)
    buffers = HeadBuffers(empty(3, 128), empty(3, 512), empty(3, **long), empty(2, dtype=torch.int32))
    head(empty(3, 128), LinearArguments(empty(512, 128), empty(128), 1e-6), buffers, uses_pdl=True)
    gemv_rows[(8,)](
        empty(1, 256), None, empty(64, 256), None, None, empty(1, 64), 0.0, 64,
        K=256, RPW=2, BK=256, NW=4, HAS_NORM=False, HAS_BIAS=False, HAS_RESIDUAL=False, ACTIVATION=0, PDL=False,
        IS_FIRST=False, num_warps=4,
    )  # fmt: skip


launches = launches_of(record)
compile_ahead.prepare_triton_ahead()
jobs = compile_ahead.missing_kernels(launches)
with compile_ahead.KernelCompilation(jobs, num_processes=2) as compilation:
    is_complete = compilation.wait()
hits = []
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
left = compile_ahead.missing_kernels(launches)
for launch in launches:
    launch.compile()
here = compile_ahead.missing_kernels(launches)
names = sorted(job.name for job in jobs)
print(
    json.dumps(
        {"jobs": names, "left": len(left), "here": len(here), "hits": hits, "is_complete": is_complete}
    )
)
sys.exit(0)
