"""What a recorded decode step takes with its attention built otherwise, and without it.

``python -m atom.benchmarks.decode_chain --variants`` runs it. Each variant is the whole step recorded anew, so that
what a kernel hides of its neighbours is in the figure. Forms that lost on an H200 are gone; ``decode_batches`` times
more of batches, ``decode_tune`` the products.
"""

from __future__ import annotations

import math
import time
from typing import Any

from atom.benchmarks.decode_launches import DecodeShape, Recorder, record_step
from atom.benchmarks.gpu_measure import relative_error
from atom.kernels.triton.fused_attention_launch import (
    ColumnShape,
    GroupedShape,
    WarpShape,
    batch_shape,
)

MAX_ERROR = 1e-2  # of bf16 against fp32, as a share of the norm
MEAN_CONTEXT = 256  # of the workload
COLUMNS = (ColumnShape(4, 8, 64, 6), ColumnShape(4, 16, 128, 3), ColumnShape(2, 16, 128, 3))
GROUPED = (  # parts, warps, tiles ahead, registers; for one or two sequences, the choices of serving among them
    (4, 8, 3, 224), (4, 8, 3, 208), (8, 8, 3, 208), (8, 8, 3, 192), (4, 8, 3, 144), (4, 8, 2, 144), (8, 4, 5, 255),
    (8, 4, 4, 255), (4, 4, 4, 255),
)  # fmt: skip
FEW = 2  # sequences up to which attention is of these two kinds
CONTEXTS = (1, 2, 16, 17, 100, 128, 129, 200, 255, 256, 257, 320, 384, 385, 513, 1024, 1025, 1026, 1500, 2000)
BATCH_SHAPES = {  # by the most sequences; short contexts like no splits, long ones do
    16: (WarpShape(1, 16, 8, 2, 128), WarpShape(1, 16, 4, 4, 128), WarpShape(4, 16, 4, 3, 0)),
    64: (WarpShape(1, 16, 4, 3, 0), WarpShape(1, 16, 4, 1, 128), WarpShape(1, 16, 4, 2, 128)),
}


def attention_shapes(shape: DecodeShape, batch: int) -> list[WarpShape]:
    """What is tried beside the choice of serving."""
    usual = batch_shape(shape.attention_layer(), batch, True)
    return [one for one in BATCH_SHAPES[16 if batch <= 16 else 64] if one != usual]


def grouped_shapes(shape: DecodeShape) -> list[GroupedShape]:
    """With 8 value columns a program or more."""
    return [GroupedShape(*one) for one in GROUPED if shape.head_dim // one[0] >= 8]


def check_attention(
    shape: DecodeShape, batch: int, grouped: GroupedShape | None = None, column: ColumnShape | None = None
) -> float:
    """The worst relative error against plain arithmetic in fp32, over contexts from 1 to 2,000 and fresh numbers."""
    import torch

    from atom.kernels.reference.decode import fused_attention
    from atom.kernels.triton.fused_attention_launch import DecodeAttention, StepTables

    device, half, page = torch.device("cuda"), torch.bfloat16, 16
    heads, kv_heads, dim, columns = shape.num_heads, shape.num_kv_heads, shape.head_dim, 577

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, device=device) * scale).to(half)

    norm = 1 + random(heads + kv_heads, dim, scale=0.1) if shape.has_qk_norm else None
    layer = shape.attention_layer(norm)
    run = DecodeAttention(
        device, [layer], 64, True, grouped is not None, column_shape=column, grouped_shape=grouped
    )
    worst = 0.0
    for number, context in enumerate(CONTEXTS):
        lens = [context, *(CONTEXTS[(number + 7 * i) % len(CONTEXTS)] for i in range(1, batch))]
        used = -(-max(lens) // page)
        pages = torch.randperm(batch * used, device=device).int() + 1
        tables = torch.full((batch + 1, columns), 7, dtype=torch.int32, device=device)
        rows = torch.arange(batch, 0, -1, device=device)
        tables[rows, :used] = pages.view(batch, used)
        own = tables[rows].tolist()
        slots = [own[i][(n - 1) // page] * page + (n - 1) % page for i, n in enumerate(lens)]
        slots = torch.tensor(slots, device=device)
        keys, values = (random(batch * used + 1, kv_heads, page, dim) for _ in range(2))
        angle = torch.randn(batch, dim // 2, device=device)
        cos = torch.cat((angle.cos(), angle.cos()), -1).to(half)
        sin = torch.cat((-angle.sin(), angle.sin()), -1).to(half)
        qkv = random(batch, (heads + 2 * kv_heads) * dim)
        found_keys, found_values = keys.clone(), values.clone()
        wanted = fused_attention(
            qkv.float(), keys, values, tables[rows], lens, slots, cos, sin, num_heads=heads, scale=dim**-0.5,
            qk_norm=norm, eps=1e-6,
        )  # fmt: skip
        out = torch.full_like(wanted, math.nan, dtype=half)
        contexts = torch.tensor(lens, dtype=torch.int32, device=device)
        step = StepTables(tables, rows, contexts, slots, cos[:, None], sin[:, None])
        run(qkv, layer, found_keys, found_values, step, out)
        pairs = (out, wanted), (found_keys, keys), (found_values, values)
        errors = [relative_error(*pair) for pair in pairs]
        worst = max([math.inf if math.isnan(e) else e for e in errors] + [worst])
    return worst


def record_variants(recorder: Recorder, shape: DecodeShape, batch: int) -> None:
    """Let ``recorder`` see every launch of every variant."""
    record_step(recorder, shape, batch)
    if batch <= FEW:
        for one in COLUMNS:
            record_step(recorder, shape, batch, column_shape=one)
        for one in grouped_shapes(shape):
            record_step(recorder, shape, batch, grouped_shape=one)
        return
    for one in attention_shapes(shape, batch):
        record_step(recorder, shape, batch, batch_shape=one)


def time_variants(
    fused: Any, replays: Any, shape: DecodeShape, budget_s: float = math.inf
) -> dict[str, float]:
    """Milliseconds a step by variant; one that fails is left out and told, one past the budget left out."""
    found: dict[str, float] = {}
    deadline = time.monotonic() + budget_s

    def measure(name: str, is_last: bool = False) -> None:
        if time.monotonic() > deadline and not is_last:
            return
        try:
            replays.record()
            found[name] = replays.time_ms(steps=48, repeats=2, context=MEAN_CONTEXT - 24)
        except Exception as error:  # blocks that do not fit the chip are no reason to stop
            print(f"{name}: {type(error).__name__}: {str(error)[:150]}", flush=True)

    batch, attention = replays.batch, fused._attention
    measure("usual")
    if batch <= FEW:
        for one in (*grouped_shapes(shape), *COLUMNS):
            if time.monotonic() > deadline:
                break
            shapes = (one, None) if isinstance(one, GroupedShape) else (None, one)
            try:
                error = check_attention(shape, batch, *shapes)
            except Exception as problem:
                print(f"{one}: {type(problem).__name__}: {str(problem)[:150]}", flush=True)
                continue
            attention._grouped_shape, attention._column_shape = shapes
            measure(f"{one} error {error:.1e}{'' if error < MAX_ERROR else ' WRONG'}")
        attention._grouped_shape = attention._column_shape = None
        replays.record()
        return found
    for one in attention_shapes(shape, batch):
        attention._batch_shape = one
        measure(f"{one}")
    attention._batch_shape = None
    fused._attention = lambda *args, **options: None
    measure("no attention", is_last=True)
    fused._attention = attention
    replays.record()
    return found
