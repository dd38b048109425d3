"""The Triton backend against the reference: under the interpreter without a device, natively with one."""

from dataclasses import replace

import pytest
import torch

from atom.kernels.reference import kv_cache as reference_kv_cache
from atom.kernels.triton import decode_attention, kv_cache
from atom.kernels.triton.decode_attention import DecodeShape
from atom.kernels.triton.varlen_attention import TileShape, plan_tiles, varlen_attention
from atom.model_ops.attentions.backend import AttentionSpec
from atom.model_ops.attentions.flash import is_uncached_prefill
from atom.model_ops.attentions.reference import ReferenceAttention
from atom.model_ops.attentions.triton import TritonAttention
from atom.utils.forward_context import AttentionMetaData

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 4
NUM_BLOCKS = 160
# Products of bf16 tiles are wrong under the interpreter of Triton 3.9; fp16 takes the same code.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def make_spec(**changes):
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.4, "dtype": torch.float32}
    return AttentionSpec(**(fields | changes))


def make_step(query_lens, context_lens, num_prefill, *, num_padding=0, by_row=False, block=BLOCK):
    """Metadata over shuffled pages, with tokens of padding behind the last sequence."""
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = [[order.pop() for _ in range(-(-c // block))] for c in context_lens]
    width = max(1, *map(len, tables))
    slots = [
        t[p // block] * block + p % block if c else -1
        for t, q, c in zip(tables, query_lens, context_lens, strict=True)
        for p in range(c - q, c)
    ] + [-1] * num_padding
    table = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
    rows = None
    if by_row:  # the table of all rows, of which this step has some in any order
        rows = torch.randperm(len(tables) + 3, generator=generator)[: len(tables)]
        wide = torch.full((len(tables) + 3, width), -7, dtype=torch.int32)
        wide[rows] = table
        table, rows = wide.to(DEVICE), rows.to(DEVICE)
    return AttentionMetaData(
        num_prefill_seqs=num_prefill,
        num_prefill_tokens=sum(query_lens[:num_prefill]),
        query_lens_host=list(query_lens),
        context_lens_host=list(context_lens),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
        block_tables=table.to(DEVICE),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=DEVICE),
        table_rows=rows,
    )


def run_both(spec, step, sinks=None, block=BLOCK):
    """(Triton's output, the reference's); asserts that both caches end up alike."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = len(step.slot_mapping)
    packed = torch.randn(
        num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, generator=generator
    )
    packed = packed.to(DEVICE, spec.dtype)
    q, k, v = packed.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    shape = (NUM_BLOCKS, spec.num_kv_heads, block, spec.head_dim)
    first = [torch.randn(shape, generator=generator).to(DEVICE, spec.dtype) for _ in range(2)]
    outputs, caches = [], []
    for backend in (TritonAttention, ReferenceAttention):
        cache = [c.clone() for c in first]
        output = torch.full(q.shape, float("nan"), dtype=q.dtype, device=DEVICE)
        with torch.device(DEVICE):
            layer = backend(spec, sinks)
        layer.forward(q, k, v, *cache, step, output)
        outputs.append(output)
        caches.append(cache)
    assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1])
    return outputs


STEPS = {
    "one_decode": ([1], [17], 0),
    "first_token": ([1], [1], 0),
    "decode_batch": ([1] * 5, [1, 4, 9, 150, 13], 0),
    "decode_padding": ([1] * 4, [70, 9, 0, 0], 0),
    "verify": ([3, 1, 4], [3, 11, 90], 0),
    "prefill": ([70, 1, 21], [70, 1, 21], 3),
    "chunks": ([5, 66], [123, 80], 2),
    "mixed": ([7, 65, 1, 1], [7, 100, 12, 90], 2),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("changes", [{}, {"window": 6}, {"num_kv_heads": 1}, {"soft_cap": 1.5}])
def test_equals_the_reference(step, changes):
    found, wanted = run_both(make_spec(**changes), make_step(*STEPS[step]))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", ["decode_batch", "decode_padding", "mixed"])
@pytest.mark.parametrize("window", [None, 9])
def test_sinks_and_rows(step, window):
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)
    spec = make_spec(has_sinks=True, window=window)
    found, wanted = run_both(spec, make_step(*STEPS[step], by_row=True), sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_padding", [1, 64, 130])
def test_padding_behind_the_last_sequence_yields_zeros(num_padding):
    found, wanted = run_both(make_spec(), make_step([66, 3, 0], [70, 3, 0], 2, num_padding=num_padding))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[69:], torch.zeros_like(found[69:]))


@pytest.mark.parametrize("head_dim, block, kv_heads", [(24, 5, 2), (128, 16, 4), (256, 16, 1)])
@pytest.mark.parametrize("step", ["decode_batch", "mixed"])
def test_shapes_of_models_in_half_precision(step, head_dim, block, kv_heads):
    spec = make_spec(head_dim=head_dim, num_kv_heads=kv_heads, dtype=HALF, scale=head_dim**-0.5)
    found, wanted = run_both(spec, make_step(*STEPS[step], block=block), block=block)
    assert found.dtype is HALF
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


VARIANTS = {
    "plain": {},
    "window": {"window": 57},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 4.0])},
    "scales": {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([3.0])},
}


class Decode:
    """Sequences of up to 150 keys, of 3 query heads of 24 channels a kv head, and what one program a head finds."""

    def __init__(self, variant):
        self.step = make_step(*STEPS["decode_batch"])
        self.step.context_lens[1] = 0
        generator = torch.Generator().manual_seed(2)
        self.q = torch.randn(5, 6, 24, generator=generator).to(DEVICE)
        self.cache = [torch.randn(NUM_BLOCKS, 2, BLOCK, 24, generator=generator).to(DEVICE) for _ in range(2)]
        self.options = {"scale": 0.3} | {
            name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
            for name, value in VARIANTS[variant].items()
        }
        self.arrivals = decode_attention.arrival_counters(torch.device(DEVICE))
        self.whole = self.run(1)

    def run(self, splits):
        output = torch.full_like(self.q, float("nan"))
        decode_attention.decode_attention(
            self.q, *self.cache, self.step.block_tables, None, self.step.context_lens, output, self.arrivals,
            shape=DecodeShape(splits, 16, 4, 2), **self.options,
        )  # fmt: skip
        assert not self.arrivals.any(), "the next launch counts from zero"
        return output


@pytest.fixture
def poisoned_workspace(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, float("nan"), **options))


@pytest.mark.parametrize("splits", [2, 4, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_number_of_splits_changes_only_roundings(variant, splits, poisoned_workspace):
    case = Decode(variant)
    found = case.run(splits)
    torch.testing.assert_close(found, case.whole, rtol=1e-5, atol=1e-6)
    assert not found[1].any(), "a sequence without keys"
    assert torch.equal(case.run(splits), found)


@pytest.mark.skipif(DEVICE == "cuda", reason="there programs arrive as they like")
def test_shares_are_added_up_in_their_order_whichever_comes_last(monkeypatch):
    from triton.runtime.interpreter import interpreter_builder

    case = Decode("sinks")
    found, set_index = case.run(16), interpreter_builder.set_grid_idx
    for order in ((7, 3), (15, 0), (1, 5)):
        factor, shift = order
        monkeypatch.setattr(
            interpreter_builder,
            "set_grid_idx",
            lambda x, y, z, factor=factor, shift=shift: set_index(x, y, (factor * z + shift) % 16),
        )
        assert torch.equal(case.run(16), found)


def test_splits_follow_the_shape_alone():
    assert decode_attention.num_splits(1, 8) == 16
    assert decode_attention.num_splits(16, 8) == 4
    assert decode_attention.num_splits(64, 8) == 1
    for kv_heads in (1, 2, 8, 71, 200):
        for num_seqs in range(1, 300):
            if decode_attention.num_splits(num_seqs, kv_heads) > 1:
                assert num_seqs * kv_heads <= decode_attention.NUM_ARRIVALS


def test_too_few_counters_of_arrivals_are_refused():
    case = Decode("plain")
    case.arrivals = case.arrivals[:9]
    assert torch.equal(case.run(1), case.whole), "one program a head counts nothing"
    with pytest.raises(ValueError, match="5 sequences of 2 kv heads in 2 splits need 10 arrivals, .* 9"):
        case.run(2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_stored_as_zero(bad):
    k = torch.randn(3, 2, 16, device=DEVICE)
    v = torch.randn(3, 2, 16, device=DEVICE)
    k[1, 0, 3] = v[2, 1, 0] = bad
    slots = torch.tensor([9, -1, 2], device=DEVICE)
    caches = [[torch.full((4, 2, BLOCK, 16), 5.0, device=DEVICE) for _ in range(2)] for _ in range(2)]
    kv_cache.write_kv(k, v, *caches[0], slots)
    reference_kv_cache.write_kv(k, v.nan_to_num(0.0, 0.0, 0.0), *caches[1], slots)
    assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1])
    assert k[1, 0, 3] == 0.0 and v[2, 1, 0] == 0.0  # attention reads them there


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("source", [torch.float32, HALF])
def test_a_narrow_cache_holds_its_largest_number_instead_of_nan(dtype, source):
    largest = torch.finfo(dtype).max
    # Numbers that need no rounding, in which the interpreter is not exact.
    k, v = (torch.randn(3, 2, 16, device=DEVICE).to(dtype).to(source) for _ in range(2))
    k[0, 0, :3] = torch.tensor([largest, 1.1 * largest, torch.finfo(source).max])
    v[2, 1, :3] = -k[0, 0, :3]
    slots = torch.tensor([9, -1, 2], device=DEVICE)
    caches = [[torch.zeros((4, 2, BLOCK, 16), device=DEVICE).to(dtype) for _ in range(2)] for _ in range(2)]
    kv_cache.write_kv(k, v, *caches[0], slots)
    reference_kv_cache.write_kv(k, v, *caches[1], slots)
    for found, wanted in zip(*caches, strict=True):
        found, wanted = found.float(), wanted.float()
        assert found.abs().max() == wanted.abs().max() == largest and (found.abs() == largest).sum() == 3
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "step, is_uncached", [("prefill", True), ("chunks", False), ("mixed", False), ("decode_batch", False)]
)
def test_flash_attention_takes_only_whole_prompts(step, is_uncached):
    metadata = make_step(*STEPS[step])
    num_tokens = len(metadata.slot_mapping)
    assert is_uncached_prefill(metadata, num_tokens) is is_uncached
    assert not is_uncached_prefill(metadata, num_tokens + 1)  # padded
    rehearsed = replace(metadata, query_lens_host=[], context_lens_host=[], num_prefill_tokens=0)
    assert not is_uncached_prefill(rehearsed, num_tokens)


def list_tiles(query_lens, context_lens, num_tokens, tile):
    """The plan, made on the host."""
    tiles, start = [], 0
    for seq, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        prefix = max(context_len - query_len, 0)
        tiles += [(-(prefix + at + tile), seq, at) for at in range(0, query_len, tile)]
        start += query_len
    plan = [[seq, at] for _, seq, at in sorted(tiles)]
    bound = -(-num_tokens // tile) + len(query_lens)
    return plan + [[-1, start + i * tile] for i in range(bound - len(plan))]


@pytest.mark.parametrize("tile", [1, 16, 32])
@pytest.mark.parametrize(
    "query_lens, context_lens, num_padding",
    [
        ([70, 1, 21], [70, 1, 21], 0),
        ([5, 66, 1, 1, 0, 0], [123, 80, 64, 65, 0, 0], 40),
        ([32] * 40, [32] * 20 + [64] * 20, 3),  # more sequences than the plan takes at a time, many ties
        ([1, 1], [0, 9], 0),
    ],
)
def test_tiles_with_most_keys_come_first(query_lens, context_lens, num_padding, tile):
    cu_seqlens = torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE)
    num_tokens = sum(query_lens) + num_padding
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    found = plan_tiles(cu_seqlens, lens, num_tokens, tile).tolist()
    assert [entry[:2] for entry in found] == list_tiles(query_lens, context_lens, num_tokens, tile)
    for seq, _, *facts, _, _, _ in found:
        if seq >= 0:
            assert facts == [sum(query_lens[:seq]), query_lens[seq], context_lens[seq]]


@pytest.mark.parametrize("uses_descriptors", [False, True])
@pytest.mark.parametrize("rows, keys", [(16, 16), (32, 64), (128, 32)])
@pytest.mark.parametrize("window", [None, 9])
def test_the_shape_of_tiles_changes_only_roundings(uses_descriptors, rows, keys, window):
    step = make_step([41, 7, 1], [41, 30, 12], 2, num_padding=3)
    packed = torch.randn(52, 8, 16, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    q, k, v = packed.split((4, 2, 2), dim=1)
    cache = [
        torch.randn(NUM_BLOCKS, 2, BLOCK, 16, generator=torch.Generator().manual_seed(i)).to(DEVICE)
        for i in range(2)
    ]
    outputs = []
    for shape in (TileShape(64, 32, 4, 2, False), TileShape(rows, keys, 4, 2, uses_descriptors)):
        outputs.append(torch.full((52, 4, 16), float("nan"), device=DEVICE))
        varlen_attention(
            q, k, v, *cache, step.block_tables, None, step.cu_seqlens_q, step.context_lens, outputs[-1],
            scale=0.4, window=window, shape=shape,
        )  # fmt: skip
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_lens", [[1, 1], [5, 3]])
def test_cached_keys_and_values_have_scales(query_lens):
    context_lens = [40, 11]
    step = make_step(query_lens, context_lens, 0)
    num_tokens = sum(query_lens)
    generator = torch.Generator().manual_seed(7)
    packed = torch.randn(num_tokens, 8, 16, generator=generator).to(DEVICE)
    q, k, v = packed.split((4, 2, 2), dim=1)
    cache = [torch.randn(NUM_BLOCKS, 2, BLOCK, 16, generator=generator).to(DEVICE) for _ in range(2)]
    kv_cache.write_kv(k, v, *cache, step.slot_mapping)
    scales = [torch.tensor([scale], device=DEVICE) for scale in (0.25, 3.0)]
    outputs = []
    scaled = [stored / scale for stored, scale in zip(cache, scales, strict=True)]
    for own, (k_scale, v_scale) in ((cache, (None, None)), (scaled, scales)):
        outputs.append(torch.empty_like(q))
        options = {"scale": 0.4, "k_scale": k_scale, "v_scale": v_scale}
        if num_tokens == len(query_lens):
            decode_attention.decode_attention(
                q, *own, step.block_tables, None, step.context_lens, outputs[-1],
                decode_attention.arrival_counters(q.device), **options,
            )  # fmt: skip
        else:
            varlen_attention(
                q, k, v, *own, step.block_tables, None, step.cu_seqlens_q, step.context_lens, outputs[-1], **options
            )  # fmt: skip
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
