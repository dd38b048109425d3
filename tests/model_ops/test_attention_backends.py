"""The CPU backend against the reference backend over the same paged cache."""

from typing import get_args

import pytest
import torch

from atom.config import Config
from atom.config_fields import type_hints
from atom.config_parts import KVCacheTensor
from atom.errors import ConfigError
from atom.kernels.cpu.native.library import native_library
from atom.model_ops.attention import Attention
from atom.model_ops.attentions.backend import _BACKENDS, AttentionSpec, override_backend, select_backend
from atom.model_ops.attentions.cpu import CpuPagedAttention, build_plan
from atom.model_ops.attentions.cpu_native import CpuNativeAttention
from atom.model_ops.attentions.reference import ReferenceAttention
from atom.utils.forward_context import AttentionMetaData, ForwardContext, set_forward_context

BLOCK = 4
NUM_BLOCKS = 200


def make_spec(**changes):
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.4, "dtype": torch.float32}
    return AttentionSpec(**(fields | changes))


def make_step(query_lens, context_lens, num_prefill, *, seed=0, skip=()):
    """Metadata over shuffled pages; tokens in ``skip`` are not written."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = [[order.pop() for _ in range(-(-c // BLOCK))] for c in context_lens]
    width = max(1, *map(len, tables))
    slots = [
        t[p // BLOCK] * BLOCK + p % BLOCK if c else -1
        for t, q, c in zip(tables, query_lens, context_lens, strict=True)
        for p in range(c - q, c)
    ]
    for token in skip:
        slots[token] = -1
    return AttentionMetaData(
        num_prefill_seqs=num_prefill,
        num_prefill_tokens=sum(query_lens[:num_prefill]),
        query_lens_host=list(query_lens),
        context_lens_host=list(context_lens),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )


def attend(backend, q, k, v, cache, step):
    """The backend's output; elements that it does not write are NaN."""
    output = torch.full(q.shape, float("nan"), dtype=q.dtype)
    backend.forward(q, k, v, *cache, step, output)
    return output


def run_both(spec, step, sinks=None, seed=1, fast=CpuPagedAttention):
    """(CPU result, reference result); asserts that both caches end up alike."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(step.query_lens_host)
    # q and k come as parts of one packed product, v strided: as models hand them over.
    packed = torch.randn(num_tokens, 8 + spec.num_heads, spec.head_dim, generator=generator).to(spec.dtype)
    q = packed[:, : spec.num_heads]
    k, v = (
        packed[:, spec.num_heads :][:, i :: 8 // spec.num_kv_heads][:, : spec.num_kv_heads] for i in (0, 1)
    )
    shape = (NUM_BLOCKS, spec.num_kv_heads, BLOCK, spec.head_dim)
    keys = torch.randn(shape, generator=generator).to(spec.dtype)
    values = torch.randn(shape, generator=generator).to(spec.dtype)
    caches = [(keys.clone(), values.clone()) for _ in range(2)]
    outs = [
        attend(backend(spec, sinks), q, k, v, cache, step)
        for backend, cache in zip((fast, ReferenceAttention), caches, strict=True)
    ]
    assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1])
    return outs


STEPS = {
    "one_decode": ([1], [17], 0),
    "one_decode_first_token": ([1], [1], 0),
    "decode_batch": ([1] * 5, [1, 4, 9, 30, 13], 0),
    "decode_very_different": ([1] * 6, [3, 150, 2, 5, 6, 31], 0),
    "verify": ([3] * 3, [3, 11, 26], 0),
    "verify_uneven": ([1, 4, 2], [9, 12, 33], 0),
    "prefill": ([6, 1, 21], [6, 1, 21], 3),
    "chunks": ([5, 8], [23, 8], 2),
    "mixed": ([7, 5, 1, 1, 1], [7, 29, 12, 90, 3], 2),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_the_reference(step, window, kv_heads):
    found, wanted = run_both(make_spec(num_kv_heads=kv_heads, window=window), make_step(*STEPS[step]))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("extra", [{"soft_cap": 1.5}, {"has_sinks": True}, {"has_sinks": True, "window": 5}])
def test_soft_cap_and_sinks(step, extra):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if extra.get("has_sinks") else None
    found, wanted = run_both(make_spec(**extra), make_step(*STEPS[step]), sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", ["decode_batch", "mixed"])
def test_bf16(step):
    found, wanted = run_both(make_spec(dtype=torch.bfloat16, head_dim=32), make_step(*STEPS[step]))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


has_native = pytest.mark.skipif(native_library() is None, reason="no C compiler")


@has_native
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "extra", [{}, {"soft_cap": 1.5}, {"has_sinks": True, "window": 5}, {"num_kv_heads": 4}]
)
def test_native_equals_the_reference(step, dtype, extra):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if extra.get("has_sinks") else None
    spec = make_spec(dtype=dtype, head_dim=32, **extra)
    found, wanted = run_both(spec, make_step(*STEPS[step]), sinks, fast=CpuNativeAttention)
    assert found.dtype is dtype
    bound = 1e-5 if dtype is torch.float32 else 2e-2  # the output's rounding
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


@has_native
def test_native_padding_skipped_slots_and_rows_of_a_table():
    spec, step = make_spec(head_dim=16), make_step([1, 1, 1], [5, 0, 13], 0, skip=(2,))
    found, wanted = run_both(spec, step, fast=CpuNativeAttention)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1], torch.zeros(4, 16))
    step.table_rows = torch.tensor([2, 1, 0])
    step.block_tables = step.block_tables.flip(0)
    torch.testing.assert_close(run_both(spec, step, fast=CpuNativeAttention)[0], wanted, rtol=1e-5, atol=1e-5)


@has_native
def test_native_is_chosen_where_it_can_run():
    assert select_backend(make_spec(head_dim=64)) is CpuNativeAttention
    assert select_backend(make_spec(head_dim=24)) is CpuPagedAttention
    assert select_backend(make_spec(head_dim=64, dtype=torch.float16)) is CpuPagedAttention


def test_slot_minus_one_is_not_written():
    found, wanted = run_both(make_spec(), make_step([1, 1, 1], [5, 9, 13], 0, skip=(1,)))
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("window", [None, 4])
def test_padded_rows_yield_zeros(window):
    found, wanted = run_both(make_spec(window=window), make_step([1, 1, 1], [5, 0, 0], 0))
    torch.testing.assert_close(found, wanted)
    assert torch.equal(found[1:], torch.zeros_like(found[1:]))


def test_tokens_behind_the_last_sequence_yield_zeros():
    step = make_step([3, 2], [3, 6], 2)
    spec = make_spec()
    q, k, v = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    step.slot_mapping = torch.cat((step.slot_mapping, torch.full((3,), -1)))
    for backend in (CpuPagedAttention, ReferenceAttention):
        cache = [torch.zeros(NUM_BLOCKS, 2, BLOCK, 8) for _ in range(2)]
        out = attend(backend(spec), q, k, v, cache, step)
        assert out[:5].isfinite().all() and torch.equal(out[5:], torch.zeros(3, 4, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_requests_overflow_does_not_reach_the_next_owner_of_its_page(bad):
    spec = make_spec()
    backend = CpuPagedAttention(spec)
    cache = [torch.zeros(NUM_BLOCKS, 2, BLOCK, 8) for _ in range(2)]
    step = make_step([4], [4], 1)
    q = torch.randn(4, 4, 8)
    attend(backend, q, torch.full((4, 2, 8), bad), torch.full((4, 2, 8), bad), cache, step)
    # The page is freed and its new owner has written one token; three stale positions follow it.
    mine, other = make_step([1], [1], 0), make_step([1, 1], [1, 9], 0, seed=4)
    mine.block_tables[:] = step.block_tables
    mine.slot_mapping[:] = int(step.block_tables[0, 0]) * BLOCK
    other.block_tables[0] = mine.block_tables[0, 0]
    other.slot_mapping[0] = mine.slot_mapping[0]
    v = torch.randn(1, 2, 8)
    for metadata in (mine, other):
        n = metadata.num_seqs
        out = attend(backend, torch.randn(n, 4, 8), torch.randn(n, 2, 8), v.expand(n, 2, 8), cache, metadata)
        torch.testing.assert_close(out[0], v[0].repeat_interleave(2, dim=0))
        assert out.isfinite().all()


def test_bounds_of_the_host_do_not_hide_keys():
    # After a rejected draft the device's length is smaller than the host's bound.
    step = make_step([1, 1], [21, 9], 0)
    exact = make_step([1, 1], [21, 9], 0)
    step.context_lens_host[0] += 3
    spec = make_spec(window=6)
    torch.testing.assert_close(run_both(spec, step)[0], run_both(spec, exact)[1])


def test_a_long_sequence_does_not_pad_the_short_ones():
    step = make_step([1] * 9, [2] * 8 + [400], 0)
    plan = build_plan(step, BLOCK, make_spec(num_kv_heads=1))
    assert sum(len(part.rows) for part in plan.decode) <= 8 + 128
    step = make_step([1] * 9, [20] * 8 + [28], 0)
    assert len(build_plan(step, BLOCK, make_spec()).decode) == 1


def test_sliding_layers_gather_only_the_windows_pages():
    step = make_step([1, 1], [400, 380], 0)
    plan = build_plan(step, BLOCK, make_spec(num_kv_heads=1, window=8))
    assert len(plan.decode[0].rows) <= 2 * 3


def test_layers_of_a_group_share_one_plan():
    step = make_step([1], [9], 0)
    backends = [CpuPagedAttention(make_spec()) for _ in range(2)]
    assert backends[0]._plan(step, BLOCK) is backends[1]._plan(step, BLOCK)


def test_selection_and_override():
    assert select_backend(make_spec()) is CpuPagedAttention
    with override_backend("reference"):
        assert select_backend(make_spec()) is ReferenceAttention
    names = "cpu_native, cpu_paged, flash_attention, reference, triton"
    with pytest.raises(ConfigError, match=f"'flash' is not one of {names}"):
        with override_backend("flash"):
            pass


def test_every_backend_can_be_asked_for():
    choices = get_args(type_hints(Config)["attention_backend"])
    assert sorted(choices) == ["auto", *sorted(_BACKENDS)]


def test_the_layer_finds_its_group_and_cache():
    layer = Attention(4, 8, 0.4, 2, "layers.1", sliding_window=6)
    assert layer.cache_shape(10, BLOCK) == (10, 2, BLOCK, 8)
    assert layer.bytes_per_block(BLOCK, torch.bfloat16) == 2 * 2 * BLOCK * 8 * 2
    step = make_step([3], [3], 1)
    cache = KVCacheTensor(0, *(torch.zeros(layer.cache_shape(NUM_BLOCKS, BLOCK)) for _ in range(2)))
    unused = make_step([3], [3], 1)
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    context = ForwardContext(
        attn_metadata={"layers.0": unused, "layers.1": step}, kv_cache_data={"layers.1": cache}
    )
    with set_forward_context(context):
        out = layer(q, k, v)
    assert out.shape == (3, 32)
    assert unused.backend_data is None
    with pytest.raises(RuntimeError, match="no forward context"):
        layer(q, k, v)
