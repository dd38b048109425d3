"""The native attention against its reference twin, over every feature of the contract in ``atom.h``."""

import dataclasses
import random

import pytest
import torch

from atom.kernels.cpu.native.arguments import AttentionArguments
from atom.kernels.cpu.native.build import TIERS, Target, build_library
from atom.kernels.cpu.native.library import NativeLibrary, native_library, pointer
from atom.kernels.reference.attention import paged_attention
from atom.platforms.cpu import cpu_facts

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="no C compiler")


@dataclasses.dataclass
class Case:
    query_lens: list[int]
    context_lens: list[int]
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16  # of the cache
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    num_padding: int = 0
    is_uniform: bool = False

    def inputs(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def randn(*size):
            return torch.randn(*size, generator=generator)

        pages = [-(-max(1, n) // self.block_size) for n in self.context_lens]
        num_blocks = sum(pages) + 1
        order = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
        table = torch.full(
            (len(pages), max(pages)), -(2**30), dtype=torch.int32
        )  # what is stale must not be read
        start = 0
        for i, count in enumerate(pages):
            table[i, :count] = order[start : start + count]
            start += count
        cache = (num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        keys, values = randn(*cache).to(self.dtype), randn(*cache).to(self.dtype)
        q = randn(sum(self.query_lens) + self.num_padding, self.num_heads, self.head_dim)
        sinks = randn(self.num_heads) if self.has_sinks else None
        return q, keys, values, table, sinks


def native(case, q, keys, values, table, sinks, num_threads=None):
    if case.window is not None:  # columns outside the window are stale
        table = table.clone()
        for row, queries, context in zip(table, case.query_lens, case.context_lens, strict=True):
            row[: max(0, context - queries - case.window + 1) // case.block_size] = 2**30
    wide = torch.randn(len(q), case.num_heads + 3, case.head_dim)  # q lies in wider rows
    wide[:, : case.num_heads] = q
    out = torch.full((len(q), case.num_heads * case.head_dim), torch.nan)
    ends = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    contexts = torch.tensor(case.context_lens, dtype=torch.int32)
    arguments = AttentionArguments(
        q=pointer(wide),
        ldq=wide.stride(0),
        out=pointer(out),
        ldo=out.stride(0),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        cache_is_bf16=case.dtype is torch.bfloat16,
        scale=case.head_dim**-0.5,
        soft_cap=case.soft_cap or 0.0,
        window=case.window or 0,
        sinks=pointer(sinks),
        keys=pointer(keys),
        values=pointer(values),
        block_tables=pointer(table),
        table_stride=table.stride(0),
        cu_seqlens_q=pointer(ends),
        context_lens=pointer(contexts),
        num_seqs=len(case.query_lens),
        num_tokens=len(q),
        is_uniform=case.is_uniform,
    )
    library.call("atom_attention", arguments)
    return out.view(len(q), case.num_heads, case.head_dim)


def reference(case, q, keys, values, table, sinks):
    out = torch.zeros_like(q)
    num = sum(case.query_lens)
    out[:num] = paged_attention(
        q[:num], keys, values, table, case.query_lens, case.context_lens,
        scale=case.head_dim**-0.5, window=case.window, soft_cap=case.soft_cap, sinks=sinks,
    )  # fmt: skip
    return out


def check(case, seed=0):
    inputs = case.inputs(seed)
    # Both are fp32 over the same rounded cache: only the order of sums and the exponential differ.
    torch.testing.assert_close(native(case, *inputs), reference(case, *inputs), rtol=2e-5, atol=5e-6)


CASES = {
    "decode": Case([1] * 3, [1, 17, 200]),
    "decode one long sequence, split": Case([1], [5000]),
    "decode split, longer than the spans of 256 allow": Case([1], [70_000], head_dim=16, num_heads=2),
    "decode many": Case([1] * 40, list(range(1, 400, 10))),
    "decode skewed": Case([1] * 5, [3000, 5, 9, 2100, 1], num_kv_heads=2),
    "heads one by one": Case([1] * 2, [700, 33], num_heads=3, num_kv_heads=3, head_dim=128),
    "seven heads a key": Case([1] * 2, [700, 33], num_heads=14, num_kv_heads=2, head_dim=80),
    "fp32 cache": Case([1, 40], [300, 100], dtype=torch.float32, head_dim=96),
    "prefill": Case([130], [130], head_dim=256),
    "prefill behind a cached prefix": Case([70, 9], [513, 140], num_heads=8, num_kv_heads=2),
    "prefill and decode": Case([200, 33, 1, 1], [200, 77, 400, 1], num_kv_heads=2),
    "odd block size": Case([50, 1, 3], [61, 43, 3], block_size=5),
    "window": Case([100, 1, 4, 300], [400, 900, 33, 300], window=37, head_dim=128),
    "window wider than the context": Case([20, 1], [20, 30], window=512),
    "sinks": Case([30, 1, 1], [90, 5, 2000], has_sinks=True, window=128),
    "soft cap": Case([30, 1], [90, 300], soft_cap=5.0),
    "verify steps of uneven length": Case([1, 4, 2, 5, 8], [50, 1300, 2, 5, 600]),
    "padding": Case([1, 1, 1, 12, 3], [9, 0, 30, 0, 0], num_padding=5),
    "only padding": Case([], [], num_padding=3),
    "one head for many": Case([3, 20], [30, 40], num_heads=71, head_dim=64),
    "uniform": Case([1, 30, 1], [400, 300, 7], is_uniform=True, has_sinks=True),
    "head_dim 512": Case([17, 1], [300, 300], head_dim=512),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_reference(case):
    if not case.query_lens:
        assert torch.equal(native(case, *_empty(case)), torch.zeros(case.num_padding, 4, 64))
        return
    check(case)


def _empty(case):
    cache = torch.zeros(1, case.num_kv_heads, case.block_size, case.head_dim, dtype=case.dtype)
    q = torch.randn(case.num_padding, case.num_heads, case.head_dim)
    return q, cache, cache, torch.zeros(1, 1, dtype=torch.int32), None


@pytest.mark.parametrize("tier", [None, *TIERS[1:3]])
def test_random_batches(tier, monkeypatch):
    if tier is not None:
        if cpu_facts().machine != "x86_64" or "avx2" not in cpu_facts().flags:
            pytest.skip(f"{tier} is no lower tier of this processor")
        lower = NativeLibrary(build_library(Target.of(cpu_facts(), tier)), 2)
        monkeypatch.setitem(globals(), "library", lower)
    rng = random.Random(5)
    for seed in range(25 if tier is None else 10):
        kv_heads = rng.choice([1, 2, 3])
        query_lens = [rng.choice([1, 1, 1, 3, 9, rng.randint(1, 150)]) for _ in range(rng.randint(1, 6))]
        case = Case(
            query_lens,
            [0 if rng.random() < 0.1 else n + rng.choice([0, 11, rng.randint(0, 900)]) for n in query_lens],
            num_heads=kv_heads * rng.choice([1, 2, 3, 4, 5, 8]),
            num_kv_heads=kv_heads,
            head_dim=rng.choice([16, 48, 64, 80, 112, 128, 256]),
            block_size=rng.choice([1, 8, 16, 64]),
            dtype=rng.choice([torch.bfloat16, torch.float32]),
            window=rng.choice([None, None, 1, 20, 300]),
            soft_cap=rng.choice([None, None, 30.0]),
            has_sinks=rng.random() < 0.3,
            num_padding=rng.choice([0, 2]),
            is_uniform=rng.random() < 0.2,
        )  # fmt: skip
        check(case, seed)


def test_bits_do_not_depend_on_threads_batch_or_chunks():
    case = Case([1, 300, 1], [3000, 300, 50], num_kv_heads=2, head_dim=128)
    q, keys, values, table, _ = case.inputs()
    together = native(case, q, keys, values, table, None)
    before = library.num_threads
    try:
        library.set_threads(1)
        assert torch.equal(native(case, q, keys, values, table, None), together)
    finally:
        library.set_threads(before)
    alone = Case([1], [3000], num_kv_heads=2, head_dim=128)
    assert torch.equal(native(alone, q[:1], keys, values, table[:1], None), together[:1])
    start = 0
    for length in (64, 17, 219):  # the prompt in three chunks
        part = Case([length], [start + length], num_kv_heads=2, head_dim=128)
        rows = slice(1 + start, 1 + start + length)
        assert torch.equal(native(part, q[rows], keys, values, table[1:2], None), together[rows])
        start += length


@pytest.mark.parametrize(
    "case",
    [
        Case([40], [340], head_dim=256),
        Case([300], [1500], num_heads=2, window=37),  # a window at odd positions, over spans
        Case([70], [2100], num_heads=3, head_dim=80, window=700, has_sinks=True),
        Case([90], [1100], num_heads=12, num_kv_heads=2, dtype=torch.float32, soft_cap=5.0),
        Case(
            [33], [1100], num_heads=20, head_dim=16, has_sinks=True
        ),  # more rows than a token alone may have
        Case([60], [1030], num_heads=1, block_size=5, dtype=torch.float32, has_sinks=True),
    ],
)
def test_uniform_bits_do_not_depend_on_how_many_tokens_come_together(case):
    case = dataclasses.replace(case, is_uniform=True)
    inputs = q, keys, values, table, sinks = case.inputs()
    together = native(case, *inputs)
    torch.testing.assert_close(together, reference(case, *inputs), rtol=2e-5, atol=5e-6)
    count, context = len(q), case.context_lens[0]
    before = library.num_threads
    try:
        for num_threads in (1, 2):
            library.set_threads(num_threads)
            for first, length in ((0, 1), (7, 1), (count - 1, 1), (3, 2), (5, 25), (0, count)):
                end = context - count + first + length
                part = dataclasses.replace(case, query_lens=[length], context_lens=[end])
                rows = slice(first, first + length)
                assert torch.equal(native(part, q[rows], keys, values, table, sinks), together[rows])
    finally:
        library.set_threads(before)


def test_nan_in_a_query_reaches_its_own_row_only():
    case = Case([1, 20], [40, 20])
    q, keys, values, table, _ = case.inputs()
    q[0, 1, 3] = torch.nan
    q[4, 2, 0] = torch.nan
    is_nan = native(case, q, keys, values, table, None).isnan()
    expected = torch.zeros_like(is_nan)
    expected[0, 1] = expected[4, 2] = True
    assert torch.equal(is_nan, expected)
