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
from atom.kernels.triton.decode_attend import BatchShape, ColumnShape, SplitShape, WarpShape
from atom.kernels.triton.decode_linear import Choice, LinearShape, default_choice, token_class

MEAN_CONTEXT = 256  # of the workload
COLUMNS = (  # parts, warps, keys of a tile, tiles ahead; for one sequence
    (4, 8, 64, 6), (4, 8, 128, 3), (4, 8, 128, 2), (4, 16, 128, 3), (4, 16, 256, 1), (2, 16, 128, 3), (2, 8, 64, 6),
)  # fmt: skip
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
    if batch == 1:
        for one in COLUMNS:
            record_step(recorder, shape, batch, column_shape=ColumnShape(*one))
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
    if batch == 1:
        for one in COLUMNS:
            attention._column_shape = ColumnShape(*one)
            measure(f"attention {one}")
        attention._column_shape = None
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
