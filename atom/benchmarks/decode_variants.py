"""What a recorded decode step takes with other block sizes: attention, products, norms; and the best of each together.

``python -m atom.benchmarks.decode_chain --variants`` runs it. Each variant is the whole step recorded anew, so that
what a kernel hides of its neighbours is in the figure.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from atom.benchmarks.decode_launches import DecodeShape, Recorder, record_step
from atom.kernels.triton.decode_linear import Choice, LinearShape, default_choice, token_class
from atom.kernels.triton.fused_attention_launch import (
    BatchShape,
    ColumnShape,
    GroupedShape,
    SplitShape,
    WarpShape,
)

MAX_ERROR = 1e-2  # of bf16 against fp32, as a share of the norm
MEAN_CONTEXT = 256  # of the workload
COLUMNS = (  # parts, warps, keys of a tile, tiles ahead; for one sequence
    (4, 8, 64, 6), (4, 8, 128, 3), (4, 8, 128, 2), (4, 16, 128, 3), (4, 16, 256, 1), (2, 16, 128, 3), (2, 8, 64, 6),
)  # fmt: skip
GROUPED = (  # parts, warps, tiles ahead, registers; for one or two sequences
    (8, 8, 3, 208), (8, 8, 3, 192), (8, 8, 3, 168), (8, 8, 3, 144), (8, 8, 2, 168), (8, 8, 2, 144), (8, 8, 2, 128),
    (4, 8, 3, 192), (4, 8, 3, 144), (4, 8, 2, 144), (8, 4, 5, 255), (8, 4, 4, 255), (4, 4, 4, 255),
)  # fmt: skip
FEW = 2  # sequences up to which attention is of these two kinds
CONTEXTS = (1, 2, 16, 17, 100, 128, 129, 200, 255, 256, 257, 320, 384, 385, 513, 1024, 1025, 1026, 1500, 2000)
BATCH_SHAPES = {  # by the most sequences
    16: (SplitShape(8, 64, 4, 3), *(WarpShape(*one) for one in ((2, 16, 4, 3, 128), (4, 16, 4, 2, 128),
         (8, 16, 2, 2, 128), (4, 16, 4, 1, 128)))),
    64: (SplitShape(1, 64, 4, 3), *(WarpShape(*one) for one in ((1, 16, 4, 2, 128), (1, 16, 4, 3, 128),
         (2, 16, 4, 2, 128), (1, 16, 8, 1, 128)))),
}  # fmt: skip
AHEAD = (128, 512, 1024)  # columns of a weight sent to the L2 cache before the wait
BLOCKS = {  # what else is tried for a shape's loop: rows, columns a step, splits, stages
    (3072, 2048, False): ((64, 128, 4, 4), (64, 128, 2, 6)),
    (2048, 2048, False): ((64, 64, 8, 4), (64, 128, 4, 4)),
    (8192, 2048, True): ((64, 128, 1, 4), (128, 128, 1, 4), (64, 64, 1, 8)),
    (2048, 8192, False): ((64, 128, 8, 6), (64, 128, 4, 6)),
    (3072, 1024, True): ((64, 64, 1, 6), (64, 128, 2, 4)),
    (4096, 1024, False): ((64, 128, 2, 5), (64, 128, 1, 6)),
    (1024, 2048, False): ((64, 64, 8, 5), (64, 128, 8, 3)),
    (1024, 3072, False): ((64, 128, 8, 4),),
    (14336, 4096, True): ((64, 128, 1, 6), (128, 128, 1, 4)),
    (6144, 4096, False): ((64, 128, 2, 5),),
}

Table = dict[tuple[LinearShape, int], Choice]


def linear_shapes(shape: DecodeShape) -> list[LinearShape]:
    return [
        LinearShape(rows // 2 if activation else rows, columns, activation)
        for rows, columns, _, activation in shape.linears.values()
    ]


def attention_shapes(batch: int) -> tuple[BatchShape, ...]:
    return BATCH_SHAPES[16 if batch <= 16 else 64]


def grouped_shapes(shape: DecodeShape) -> list[GroupedShape]:
    """With 8 value columns a program or more."""
    return [GroupedShape(*one) for one in GROUPED if shape.head_dim // one[0] >= 8]


def check_attention(shape: DecodeShape, batch: int, column: Any = None, grouped: Any = None) -> float:
    """The worst relative error against plain arithmetic in fp32, over contexts from 1 to 2,000 and fresh numbers."""
    import torch

    from atom.kernels.reference.decode import fused_attention
    from atom.kernels.triton.fused_attention_launch import AttentionLayer, DecodeAttention, StepTables

    device, half, page = torch.device("cuda"), torch.bfloat16, 16
    heads, kv_heads, dim, columns = shape.num_heads, shape.num_kv_heads, shape.head_dim, 577

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, device=device) * scale).to(half)

    norm = 1 + random(heads + kv_heads, dim, scale=0.1) if shape.has_qk_norm else None
    layer = AttentionLayer(heads, kv_heads, dim, dim**-0.5, dim, 0, qk_norm=norm, eps=1e-6)
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
        errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
        worst = max([math.inf if math.isnan(e) else e for e in errors] + [worst])
    return worst


def ahead_table(shape: DecodeShape, batch: int, ahead: int) -> Table:
    """The usual choices, loops with ``ahead`` columns of the weight on their way."""
    table = {}
    for one in linear_shapes(shape):
        choice = default_choice(one, batch, True)
        if choice.kernel == "loop":
            columns = min(ahead, one.K // choice.blocks[2])
            columns = columns & -columns
            table[one, token_class(batch)] = replace(choice, blocks=(*choice.blocks[:4], columns))
    return table


def block_tables(shape: DecodeShape, batch: int) -> dict[str, Table]:
    """One other choice each."""
    return {
        f"{one.N}x{one.K} {blocks}": {(one, token_class(batch)): Choice("loop", (*blocks, 0))}
        for one in linear_shapes(shape)
        for blocks in BLOCKS.get((one.N, one.K, one.activation > 0), ())
        if Choice("loop", (*blocks, 0)) != default_choice(one, batch, True)
    }


def record_variants(recorder: Recorder, shape: DecodeShape, batch: int) -> None:
    """Let ``recorder`` see every launch of every variant."""
    record_step(recorder, shape, batch)
    if batch <= FEW:
        for one in COLUMNS:
            record_step(recorder, shape, batch, column_shape=ColumnShape(*one))
        for one in grouped_shapes(shape):
            record_step(recorder, shape, batch, grouped_shape=one)
        return
    for one in attention_shapes(batch):
        record_step(recorder, shape, batch, batch_shape=one)
    tables = [ahead_table(shape, batch, ahead) for ahead in AHEAD]
    for table in (*tables, *block_tables(shape, batch).values()):
        record_step(recorder, shape, batch, table=table)
    record_step(recorder, shape, batch, halves_norms=False)


def time_variants(
    fused: Any, replays: Any, shape: DecodeShape, budget_s: float = math.inf
) -> dict[str, float]:
    """Milliseconds a step by variant; one that fails is left out and told, one past the budget left out."""
    found: dict[str, float] = {}
    deadline = time.monotonic() + budget_s

    def measure(name: str, is_last: bool = False) -> float:
        if time.monotonic() > deadline and not is_last:
            return math.inf
        try:
            replays.record()
            found[name] = replays.time_ms(steps=48, repeats=2, context=MEAN_CONTEXT - 24)
        except Exception as error:  # blocks that do not fit the chip are no reason to stop
            print(f"{name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            return math.inf
        return found[name]

    batch, attention, linear = replays.batch, fused._attention, fused._linear
    usual = measure("usual")
    if batch <= FEW:
        kinds = [("grouped", one) for one in grouped_shapes(shape)] + [
            ("columns", ColumnShape(*c)) for c in COLUMNS
        ]
        for kind, one in kinds:
            if time.monotonic() > deadline:
                break
            try:
                error = check_attention(shape, batch, **{"grouped" if kind == "grouped" else "column": one})
            except Exception as problem:
                print(f"{kind} {tuple(one)}: {type(problem).__name__}: {str(problem)[:150]}", flush=True)
                continue
            attention._grouped_shape, attention._column_shape = (
                (one, None) if kind == "grouped" else (None, one)
            )
            verdict = "" if error < MAX_ERROR else " WRONG"
            measure(f"{kind} {tuple(one)} error {error:.1e}{verdict}")
        attention._grouped_shape = attention._column_shape = None
        replays.record()
        return found
    best_shape, fastest = None, usual
    for one in attention_shapes(batch):
        attention._batch_shape = one
        if measure(f"attention {one}") < fastest:
            best_shape, fastest = one, found[f"attention {one}"]
    attention._batch_shape = None
    fused._halves_norms = False
    measure("whole norms")
    fused._halves_norms = True
    own_table, best_tables = linear._table, []
    linear_variants = {f"ahead {ahead}": ahead_table(shape, batch, ahead) for ahead in AHEAD}
    fastest = usual
    for name, table in linear_variants.items():
        linear._table = own_table | table
        if measure(name) < fastest:
            best_tables, fastest = [table], found[name]
    for name, table in block_tables(shape, batch).items():
        linear._table = own_table | table
        linear.reserve(linear_shapes(shape))
        if measure(name) < 0.995 * usual:
            best_tables.append(table)
    linear._table = own_table
    for table in best_tables:
        linear._table = linear._table | table
    attention._batch_shape = best_shape
    measure(f"together: {best_shape} and {len(best_tables)} tables", is_last=True)
    linear._table, attention._batch_shape = own_table, None
    fused._attention = lambda *args, **options: None
    measure("no attention", is_last=True)
    fused._attention = attention
    replays.record()
    return found
