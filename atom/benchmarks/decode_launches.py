"""Which kernels a fused decode step launches, found without a device, and compiling them side by side.

Launches are recorded on meta tensors through the same code that serves, so that what is compiled is what runs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from atom.kernels.triton.compile_ahead import Launch, Recorder, recording
from atom.model_ops.outbox import SLOTS
from atom.platforms import get_platform

if TYPE_CHECKING:
    from atom.kernels.triton.fused_attention_launch import AttentionLayer

META = torch.device("meta")


@dataclass(frozen=True)
class DecodeShape:
    """A dense model as far as a decode step's kernels go."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    has_qk_norm: bool

    @property
    def linears(self) -> dict[str, tuple[int, int, bool, int]]:
        """By name: rows of the weight, columns, whether a norm is before it, activation."""
        heads, rows = self.num_heads * self.head_dim, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "qkv": (rows, hidden, True, 0),
            "o": (hidden, heads, False, 0),
            "gate_up": (2 * inner, hidden, True, 1),
            "down": (hidden, inner, False, 0),
        }

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's products."""
        return sum(rows * columns for rows, columns, *_ in self.linears.values())

    def attention_layer(self, qk_norm: torch.Tensor | None = None) -> AttentionLayer:
        """As ``DecodeAttention`` takes it; ``qk_norm [heads + kv heads, head_dim]``."""
        from atom.kernels.triton.fused_attention_launch import AttentionLayer

        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        return AttentionLayer(heads, kv_heads, dim, dim**-0.5, dim, 0, qk_norm=qk_norm, eps=1e-6)


SHAPES = (
    DecodeShape("qwen3-0.6b", 1024, 16, 8, 128, 3072, 151936, True),
    DecodeShape("llama-3.2-1b", 2048, 32, 8, 64, 8192, 128256, False),
    DecodeShape("llama-3.1-8b", 4096, 32, 8, 128, 14336, 128256, False),
)


def compile_side_by_side(launches: list[Launch], num_processes: int | None = None) -> None:
    """Compile into Triton's disk cache from forked processes; call it before CUDA is initialised here."""
    began = time.monotonic()
    count = num_processes or max(1, min(14, get_platform("cpu").default_num_threads))
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            _compile_all(launches[number::count])
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    print(f"{len(launches)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)


def _compile_all(launches: list[Launch]) -> None:
    for launch in launches:
        args = [a.dtype if isinstance(a, torch.Tensor) else a for a in launch.positional]
        try:
            launch.compile(tuple(args))
        except Exception as error:  # the run that needs it will say so again
            print(f"{launch.label}: {type(error).__name__}: {str(error)[-300:]}", file=sys.stderr, flush=True)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def record_step(
    recorder: Recorder,
    shape: DecodeShape,
    num_tokens: int,
    *,
    has_gluon: bool = True,
    uses_pdl: bool = True,
    cache_dtype: torch.dtype = torch.bfloat16,
    column_shape: Any = None,
    batch_shape: Any = None,
    grouped_shape: Any = None,
) -> None:
    """Let ``recorder`` see every launch of a step of ``num_tokens`` sequences."""
    from atom.kernels.triton.decode_choices import MAX_TOKENS
    from atom.kernels.triton.decode_linear import DecodeLinear, HeadBuffers, LinearArguments, Scaled, head
    from atom.kernels.triton.decode_step import Embedding, choose, embed, final_norm, prepare_decode
    from atom.kernels.triton.fused_attention_launch import DecodeAttention, StepTables
    from atom.kernels.triton.step_inputs import take_decode

    n, hidden, dim = num_tokens, shape.hidden_size, shape.head_dim
    where = f"{shape.name} M={n}"
    long = {"dtype": torch.int64}
    linear = DecodeLinear(META, has_gluon=has_gluon, uses_pdl=uses_pdl)
    norm, is_many = empty(hidden), n > MAX_TOKENS
    next_x, scaled = empty(n, hidden), None
    for part in ("o", "gate_up", "down", "qkv"):
        rows, columns, has_norm, activation = shape.linears[part]
        layer = LinearArguments(empty(rows, columns), norm if has_norm else None, 1e-6, None, activation)
        recorder.label = f"{where} {part} {linear.choice(layer.shape, n)}"
        out = empty(n, layer.shape.N)
        if has_norm:
            linear(empty(n, columns), layer, out, scaled=scaled)
            if part == "qkv":
                recorder.label += " of the first layer"
                halved = Scaled(next_x, 1) if is_many else None
                linear(empty(n, columns), layer, out, is_first=True, scaled=halved)
            continue
        next_norm = norm if n > 1 else None
        scaled = linear(empty(n, columns), layer, out, out, next_norm=next_norm, next_x=next_x)
        if part == "down" and n > 1 and not is_many:  # of the last layer
            linear(empty(n, columns), layer, out, out)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    qk_norm = empty(heads + kv_heads, dim) if shape.has_qk_norm else None
    attention = shape.attention_layer(qk_norm)
    attend = DecodeAttention(
        META, [attention], max(n, MAX_TOKENS), uses_pdl, has_gluon, column_shape, batch_shape, grouped_shape
    )
    cache = empty(999, kv_heads, 16, dim, dtype=cache_dtype)
    scale = empty(1, dtype=torch.float32)
    angles = empty(n, 1, dim), empty(n, 1, dim)
    lens, table = empty(n, dtype=torch.int32), empty(257, 577, dtype=torch.int32)
    step = StepTables(table, empty(n, **long), lens, empty(n, **long), *angles)
    recorder.label = f"{where} attention {cache_dtype}"
    scales = None if cache_dtype is torch.bfloat16 else (scale, scale)
    attend(empty(n, shape.linears["qkv"][0]), attention, cache, cache, step, empty(n, heads * dim), scales)
    recorder.label = f"{where} head"
    keys = empty(n, **long)
    head_layer = LinearArguments(empty(shape.vocab_size, hidden), norm, 1e-6)
    if is_many:
        final_norm(empty(n, hidden), norm, empty(n, hidden), 1e-6, uses_pdl)
    else:
        buffers = HeadBuffers(empty(n, hidden), empty(n, shape.vocab_size), keys, empty(2, dtype=torch.int32))
        head(empty(n, hidden), head_layer, buffers, uses_pdl=uses_pdl)
        moved = (keys, lens, empty(257, dtype=torch.int32), empty(257, **long))
        outbox = empty(1, **long), empty(SLOTS, n + 1, **long), empty(SLOTS, n, dtype=torch.bool)
        choose(keys, keys, empty(n, dtype=torch.bool), moved, uses_pdl, outbox)
    recorder.label = f"{where} around"
    rope = tuple(empty(*size, dtype=torch.float32) for size in ((1, dim), (1, dim), (1,)))
    half_norm = (norm, next_x, empty(n, dtype=torch.float32)) if is_many else None
    embedding = Embedding(head_layer.weight, rope, empty(n, hidden), *angles, keys, 1.0, half_norm)
    embed(keys, keys, embedding)
    packed, tables = empty(999, dtype=torch.int32), empty(1, 257, 577, dtype=torch.int32)
    for together in (None, embedding):
        prepare_decode(packed, lens, keys, tables, n, 256, 16, True, together, uses_pdl)
    take_decode(packed, packed, tables, n, 1)


def launches_of(record: Callable[[Recorder], None]) -> list[Launch]:
    with recording() as recorder:
        record(recorder)
    return list(recorder.launches.values())
