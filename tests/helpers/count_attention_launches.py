"""What a layer's attention launches in a decode step without a fused chain, found without a device; prints names."""

import json

import torch
from triton.runtime import driver

from atom.kernels.triton.compile_ahead import recording
from atom.kernels.triton.compile_worker import KernelTarget, TargetDriver
from atom.model_ops.attentions.backend import AttentionSpec
from atom.model_ops.attentions.triton import TritonAttention
from atom.utils.forward_context import AttentionMetaData

BATCHES = (1, 8, 16, 65, 256)
LAYERS = {
    "gemma-3-1b": AttentionSpec(4, 1, 256, 0.06, torch.bfloat16, window=512),
    "capped": AttentionSpec(8, 4, 256, 0.06, torch.bfloat16, soft_cap=50.0),
    "sinks": AttentionSpec(64, 8, 64, 0.12, torch.bfloat16, window=128, has_sinks=True),
    "8b in fp16": AttentionSpec(32, 8, 128, 0.09, torch.float16),
}


class Counter:
    """Names of kernels and their grids, in the order in which they would be launched."""

    def __init__(self):
        self.launches = []

    def run(self, kernel, *args, grid, warmup, **options):
        self.launches.append((kernel.fn.__name__, grid))


def launches(spec, n):
    def empty(*shape, dtype=spec.dtype):
        return torch.empty(shape, dtype=dtype)

    heads, dim = spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
    layer = TritonAttention(spec, empty(spec.num_heads) if spec.has_sinks else None)
    long, lens = empty(n, dtype=torch.int64), empty(n, dtype=torch.int32)
    starts, table = empty(n + 1, dtype=torch.int32), empty(n, 99, dtype=torch.int32)
    step = AttentionMetaData(0, 0, [1] * n, [1500] * n, starts, lens, table, long)
    cache = [empty(99, spec.num_kv_heads, 16, dim) for _ in range(2)]
    rotation = [empty(n, 1, dim) for _ in range(2)]
    counter = Counter()
    with recording(counter):
        layer.forward_projected(
            empty(n, heads, dim), *rotation, None, 1e-6, *cache, step, empty(n, spec.num_heads, dim)
        )
    return counter.launches


def main():
    driver.set_active(TargetDriver(KernelTarget("cuda", 90, 32)))
    with torch.device("meta"):
        found = {name: {n: launches(spec, n) for n in BATCHES} for name, spec in LAYERS.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
