"""A step of fused decode attention beside its plain twin, and what tests of decode kernels share.

The interpreter multiplies bf16 tiles wrongly, so fp16 stands in for it where there is no device.
"""

import torch

from atom.kernels.reference import decode as reference
from atom.kernels.triton.fused_attention_launch import (
    AttentionLayer,
    ColumnShape,
    DecodeAttention,
    StepTables,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Relative error against fp32 arithmetic on the same inputs: inputs are rounded once behind a norm, results once.
BOUND = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def random(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def error(found, wanted):
    assert torch.isfinite(found.float()).all()
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def close(found, wanted):
    return error(found, wanted) < BOUND[found.dtype]


class Case:
    """A paged cache with sequences of given lengths, its pages in random order; page 0 is poison."""

    def __init__(self, lens, dtype, *, heads=4, kv_heads=2, dim=16, rotary=16, page=16, cache_dtype=None):
        self.lens = lens
        self.shape = heads, kv_heads, dim
        counts = [-(-n // page) for n in lens]
        pages = (torch.randperm(sum(counts)) + 1).int().split(counts)
        tables = torch.zeros(len(lens), max(1, *counts), dtype=torch.int32)
        for row, own in zip(tables, pages, strict=True):
            row[: len(own)] = own
        self.tables = tables.to(DEVICE)
        size = sum(counts) + 1, kv_heads, page, dim
        self.keys, self.values = (random(*size).to(cache_dtype or dtype) for _ in range(2))
        self.keys[0] = self.values[0] = 240.0
        slots = [
            int(t[(n - 1) // page]) * page + (n - 1) % page if n else -1
            for t, n in zip(tables, lens, strict=True)
        ]
        self.slots = torch.tensor(slots, device=DEVICE)
        self.qkv = random(len(lens), (heads + 2 * kv_heads) * dim, dtype=dtype)
        angle = random(len(lens), rotary // 2)
        self.cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
        self.sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
        self.scale = dim**-0.5

    def lower_scores(self):
        """Let all scores lie between -1e33 and -1e36; returns the case."""
        heads, _, dim = self.shape
        self.cos.fill_(1.0)
        self.sin.zero_()
        self.keys.abs_()
        self.qkv.abs_()[:, : heads * dim].neg_()
        self.scale = 1e33
        return self

    def check(self, *, splits=None, rows=True, scales=None, bound=None, launch=None, repeats=0, **fields):
        """``launch``: what the launcher is built with, other than the portable kernel for few sequences.

        ``repeats``: how often it runs once more and must say the same, bit for bit.
        """
        bound = bound or BOUND[self.qkv.dtype]
        heads, kv_heads, dim = self.shape
        layer = AttentionLayer(
            heads, kv_heads, dim, self.scale, self.cos.shape[-1], rope=1, eps=1e-6, **fields
        )
        order = torch.randperm(len(self.lens)).to(DEVICE) if rows else None
        tables = self.tables
        if rows:
            tables = torch.empty_like(tables)
            tables[order] = self.tables
        # Rotation 0 belongs to other layers.
        cos, sin = (torch.stack((torch.full_like(t, 7.0), t), 1) for t in (self.cos, self.sin))
        lens = torch.tensor(self.lens, dtype=torch.int32, device=DEVICE)
        keys, values = self.keys.clone(), self.values.clone()
        wanted = reference.fused_attention(
            self.qkv, keys, values, self.tables, self.lens, self.slots, self.cos, self.sin, num_heads=heads,
            scale=self.scale, eps=1e-6, scales=tuple(float(s) for s in scales or (1.0, 1.0)), **fields,
        )  # fmt: skip
        launch = launch or {"column_shape": ColumnShape(2, 4, 64, 6)}
        run = DecodeAttention(self.qkv.device, [layer], len(self.lens), **launch)
        run._partial.fill_(float("nan"))
        run._stats.fill_(float("nan"))
        out = torch.full_like(wanted, float("nan"))
        own_keys, own_values = self.keys.clone(), self.values.clone()
        step = StepTables(tables, order, lens, self.slots, cos, sin)
        run(self.qkv, layer, own_keys, own_values, step, out, scales, splits=splits)
        assert error(out, wanted) < bound
        assert not run._arrivals.any()
        first = out.clone()
        for _ in range(repeats):
            out.fill_(float("nan"))
            run(self.qkv, layer, own_keys, own_values, step, out, scales, splits=splits)
            assert torch.equal(out, first)
        rounding = max(bound, torch.finfo(keys.dtype).eps)
        for own, theirs in ((own_keys, keys), (own_values, values)):
            own, theirs = (cache.float().transpose(1, 2).flatten(0, 1) for cache in (own, theirs))
            written = torch.zeros(len(own), dtype=torch.bool, device=DEVICE)
            written[self.slots[self.slots >= 0]] = True
            assert torch.equal(own[~written], theirs[~written]), "only this step's rows are written"
            assert (
                error(own[written], theirs[written]) < rounding
            ), "this step's rows differ by rounding alone"
