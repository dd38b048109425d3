"""The kernels of serving shapes on a CUDA device against fp32, on fresh random data in bf16."""

import time

import pytest
import torch
import torch.nn.functional as F

from atom.benchmarks.gpu_kernels import VARLEN_SHAPES
from atom.kernels.reference import activation, norm, rotary
from atom.kernels.reference.attention import attend
from atom.kernels.reference.kv_cache import stored
from atom.kernels.triton import elementwise
from atom.kernels.triton.decode_attention import arrival_counters, decode_attention
from atom.kernels.triton.gated_linear import SHAPE, TALL, launch
from atom.kernels.triton.kv_cache import write_kv
from atom.kernels.triton.prefill_table import TORCH
from atom.kernels.triton.rotary_cache import rotate_and_write
from atom.kernels.triton.varlen_attention import HOPPER_SHAPE, tile_shape, varlen_attention
from atom.model_ops.attentions import triton as triton_backend
from atom.model_ops.attentions.backend import AttentionSpec, select_backend
from atom.model_ops.attentions.flash import FlashAttention
from atom.model_ops.attentions.triton import TritonAttention
from atom.platforms import get_platform
from atom.utils.forward_context import AttentionMetaData

pytestmark = pytest.mark.gpu

HEADS = {
    "0.6B": (16, 8, 128),
    "1B": (32, 8, 64),
    "8B": (32, 8, 128),
    "gemma": (4, 1, 256),
    "mqa": (71, 1, 64),
}
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PAGE = 16
MAX_ERROR = 1e-2  # ||found - wanted|| / ||wanted||
STEPS = {
    "whole_prompts": ([700, 1, 130, 31], [700, 1, 130, 31], 0),
    "chunks": ([300, 65], [1000, 97], 11),
    "mixed": ([513, 40, 1, 1, 0], [513, 333, 900, 17, 0], 200),
    # A bucket with room for many: programs have several tiles each, then padding, then nothing.
    "bucket": ([1100, 900, 64, 129] + [0] * 120, [1100, 900, 200, 129] + [0] * 120, 1600),
}


@pytest.fixture(autouse=True)
def fresh_numbers():
    torch.manual_seed(time.time_ns() % 2**31)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def error_of(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


class Step:
    """Random queries, keys and values of sequences whose earlier tokens are in shuffled pages."""

    def __init__(self, heads, query_lens, context_lens, padding=0):
        self.num_heads, kv, dim = heads
        self.query_lens, self.context_lens = query_lens, context_lens
        self.num_tokens = sum(query_lens) + padding
        width = max(1, -(-max(context_lens) // PAGE))
        num_pages = len(query_lens) * width + 3
        self.cache = [randn(num_pages, kv, PAGE, dim) for _ in range(2)]
        self.tables = torch.randperm(num_pages, device="cuda")[: len(query_lens) * width]
        self.tables = self.tables.view(len(query_lens), width).int()
        self.cu_seqlens = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
        self.lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
        self.qkv = randn(self.num_tokens, self.num_heads + 2 * kv, dim)
        self.q, self.k, self.v = self.qkv.split((self.num_heads, kv, kv), dim=1)
        slots = [
            int(table[p // PAGE]) * PAGE + p % PAGE
            for table, query_len, context_len in zip(
                self.tables.tolist(), query_lens, context_lens, strict=True
            )
            for p in range(context_len - query_len, context_len)
        ]
        self.slots = torch.tensor(slots + [-1] * padding, device="cuda")

    def wanted(self, **options):
        write_kv(self.k, self.v, *self.cache, self.slots)
        parts, start = [], 0
        for seq, (count, context) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            if count:
                pages = self.tables[seq].long()
                k, v = (c[pages].transpose(1, 2).flatten(0, 1)[:context].float() for c in self.cache)
                parts.append(attend(self.q[start : start + count].float(), k, v, **options))
            start += count
        padding = self.num_tokens - start
        return torch.cat((*parts, torch.zeros(padding, *parts[0].shape[1:], device="cuda")))

    def metadata(self):
        return AttentionMetaData(
            num_prefill_seqs=len(self.query_lens),
            num_prefill_tokens=sum(self.query_lens),
            query_lens_host=self.query_lens,
            context_lens_host=self.context_lens,
            cu_seqlens_q=self.cu_seqlens,
            context_lens=self.lens,
            block_tables=self.tables,
            slot_mapping=self.slots,
        )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"soft_cap": 20.0, "sinks": True}], ids=str)
def test_prefill_attention(heads, step, options):
    state = Step(HEADS[heads], *STEPS[step])
    options = dict(options, scale=HEADS[heads][2] ** -0.5)
    if options.get("sinks"):
        options["sinks"] = randn(HEADS[heads][0], dtype=torch.float32)
    wanted = state.wanted(**options)
    output = torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)
    varlen_attention(
        state.q, state.k, state.v, *state.cache, state.tables, None, state.cu_seqlens, state.lens, output, **options
    )  # fmt: skip
    assert error_of(output, wanted) < MAX_ERROR
    assert not output[sum(state.query_lens) :].any()


@pytest.mark.parametrize("heads", ["0.6B", "1B", "8B"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_gluon", [False, True], ids=["portable", "gluon"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_prefill_kernels_of_sm_90(heads, step, is_gluon, has_sinks):
    if get_platform("cuda").architecture() != "sm_90":
        pytest.skip("kernels for sm_90")
    state = Step(HEADS[heads], *STEPS[step])
    num_heads, kv, dim = HEADS[heads]
    shape = HOPPER_SHAPE if is_gluon else tile_shape(torch.bfloat16, dim, num_heads // kv, True)
    options = {"scale": dim**-0.5}
    if has_sinks:
        options["sinks"] = randn(num_heads, dtype=torch.float32)
    wanted = state.wanted(**options)
    output = torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)
    for _ in range(3):
        varlen_attention(
            state.q, state.k, state.v, *state.cache, state.tables, None, state.cu_seqlens, state.lens, output,
            shape=shape, **options,
        )  # fmt: skip
    assert error_of(output, wanted) < MAX_ERROR
    assert not output[sum(state.query_lens) :].any()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch, context", [(1, 220), (8, 1100), (64, 1100), (256, 513)])
def test_decode_attention(heads, batch, context):
    lens = [max(1, context - 3 * i) for i in range(batch)]
    state = Step(HEADS[heads], [1] * batch, lens)
    scale = HEADS[heads][2] ** -0.5
    wanted = state.wanted(scale=scale)
    output = torch.full_like(wanted, float("nan"), dtype=torch.bfloat16)
    arrivals = arrival_counters(state.q.device)
    decode_attention(state.q, *state.cache, state.tables, None, state.lens, output, arrivals, scale=scale)
    assert error_of(output, wanted) < MAX_ERROR
    assert not arrivals.any()


@pytest.mark.parametrize("heads", ["8B", "gemma"])
@pytest.mark.parametrize("options", [{}, {"window": 600, "soft_cap": 20.0, "sinks": True}], ids=str)
def test_recorded_decode_steps_add_up_shares_in_their_order(heads, options):
    """Graphs of two batches share the counters of arrivals; replays equal plain launches bit for bit."""
    options = dict(options, scale=HEADS[heads][2] ** -0.5)
    if options.get("sinks"):
        options["sinks"] = randn(HEADS[heads][0], dtype=torch.float32)
    arrivals = arrival_counters(torch.device("cuda"))
    steps = [Step(HEADS[heads], [1] * batch, [1500 - 90 * i for i in range(batch)]) for batch in (1, 12)]
    wanted = [step.wanted(**options) for step in steps]

    def run(step, output):
        decode_attention(step.q, *step.cache, step.tables, None, step.lens, output, arrivals, **options)
        return output

    plain = [run(step, torch.full_like(step.q, float("nan"))) for step in steps]
    voided = torch.cuda.CUDAGraph()
    with pytest.raises(ZeroDivisionError), torch.cuda.graph(voided):
        run(steps[1], torch.empty_like(steps[1].q))
        raise ZeroDivisionError
    outputs, graphs = [torch.empty_like(step.q) for step in steps], []
    for step, output in zip(steps, outputs, strict=True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(3):  # layers of a step
                run(step, output)
    for _ in range(20):
        for graph, output, first, theirs in zip(graphs, outputs, plain, wanted, strict=True):
            output.fill_(float("nan"))
            graph.replay()
            assert torch.equal(output, first) and error_of(output, theirs) < MAX_ERROR
    for length in (1, 33, 700, 0):  # fewer programs have keys than the graphs launch
        for step in steps:
            step.lens.fill_(length)
        for graph, output, step in zip(graphs, outputs, steps, strict=True):
            graph.replay()
            assert torch.equal(output, run(step, torch.full_like(step.q, float("nan"))))
    assert not arrivals.any()


@pytest.mark.parametrize("query_lens", [[1] * 5, [400, 3, 1, 60, 200]])
def test_an_fp8_cache_with_scales(query_lens):
    """Against the same cache widened; what fp8 itself costs is no matter of the kernel."""
    state = Step(HEADS["8B"], query_lens, [500, 300, 77, 1000, 600])
    scales = [torch.tensor([scale], device="cuda") for scale in (0.02, 0.01)]
    small = [stored(c / scale, torch.float8_e4m3fn) for c, scale in zip(state.cache, scales, strict=True)]
    wide = [(c.float() * scale).bfloat16() for c, scale in zip(small, scales, strict=True)]
    outputs = []
    for cache, (k_scale, v_scale) in ((small, scales), (wide, (None, None))):
        outputs.append(torch.full_like(state.q, float("nan")))
        options = {"scale": 0.09, "k_scale": k_scale, "v_scale": v_scale}
        if len(query_lens) == state.num_tokens:
            arrivals = arrival_counters(state.q.device)
            decode_attention(
                state.q, *cache, state.tables, None, state.lens, outputs[-1], arrivals, **options
            )
        else:
            varlen_attention(
                state.q, state.k, state.v, *cache, state.tables, None, state.cu_seqlens, state.lens, outputs[-1],
                **options,
            )  # fmt: skip
    assert error_of(*outputs) < MAX_ERROR


@pytest.mark.parametrize("heads", ["8B", "1B"])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("step", ["whole_prompts", "chunks"])
def test_flash_attention_says_the_same(heads, window, step):
    num_heads, kv, dim = HEADS[heads]
    spec = AttentionSpec(num_heads, kv, dim, dim**-0.5, torch.bfloat16, window=window)
    if not FlashAttention.supports(get_platform("cuda"), spec):
        pytest.skip("this PyTorch has no varlen attention with windows")
    state = Step(HEADS[heads], *STEPS[step])
    outputs = []
    for backend in (FlashAttention, TritonAttention):
        outputs.append(torch.full_like(state.q, float("nan")))
        backend(spec).forward(state.q, state.k, state.v, *state.cache, state.metadata(), outputs[-1])
    assert error_of(*outputs) < MAX_ERROR


@pytest.mark.parametrize("choice", [*VARLEN_SHAPES, TORCH], ids=str)
@pytest.mark.parametrize("heads", ["8B", "1B"])
def test_whatever_was_measured_to_be_the_fastest_says_the_same(heads, choice, monkeypatch):
    num_heads, kv, dim = HEADS[heads]
    spec = AttentionSpec(num_heads, kv, dim, dim**-0.5, torch.bfloat16)
    if choice == TORCH and not FlashAttention.supports(get_platform("cuda"), spec):
        pytest.skip("this PyTorch has no varlen attention with windows")
    usual = TritonAttention(spec)
    monkeypatch.setattr(triton_backend, "measured_choices", lambda platform, layer: {64: choice})
    with torch.device("cuda"):
        chosen = select_backend(spec)
        assert chosen is (FlashAttention if choice == TORCH else TritonAttention)
        measured = chosen(spec)
    state, outputs = Step(HEADS[heads], *STEPS["whole_prompts"]), []
    for backend in (measured, usual):
        outputs.append(torch.full_like(state.q, float("nan")))
        backend.forward(state.q, state.k, state.v, *state.cache, state.metadata(), outputs[-1])
    assert error_of(*outputs) < MAX_ERROR


@pytest.mark.parametrize("heads", ["0.6B", "1B", "gemma"])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 777])
def test_rotation_and_cache_write(heads, has_norm, num_tokens):
    state = Step(HEADS[heads], [num_tokens], [num_tokens + 50])
    num_heads, kv, dim = HEADS[heads]
    turned = num_heads + kv
    cos, sin = (randn(num_tokens, 1, dim) for _ in range(2))
    weight = randn(turned, dim, dtype=torch.float32) if has_norm else None
    wanted = state.qkv[:, :turned]
    if has_norm:
        wanted = norm.rms_norm(wanted, weight, 1e-6)
    wanted = torch.cat((rotary.rotary(wanted, cos, sin), state.v), dim=1)
    rotate_and_write(state.qkv, num_heads, cos, sin, weight, 1e-6, *state.cache, state.slots)
    assert error_of(state.qkv, wanted) < MAX_ERROR
    written = [c.transpose(1, 2).flatten(0, 1)[state.slots] for c in state.cache]
    assert torch.equal(torch.cat(written, dim=1), state.qkv[:, num_heads:])


@pytest.mark.parametrize("size", [1024, 2048, 4096, 14336])
def test_norms_and_gates(size):
    x, weight = randn(300, size), randn(size, dtype=torch.float32)
    assert error_of(elementwise.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5)) < MAX_ERROR
    gate_up = 3 * randn(300, 2 * size)
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        found, wanted = (getattr(module, name)(gate_up) for module in (elementwise, activation))
        assert error_of(found, wanted) < MAX_ERROR


def gated_case(num_tokens, hidden, size, dtype=torch.bfloat16):
    return randn(num_tokens, hidden, dtype=dtype), (2 * randn(2 * size, hidden) / hidden**0.5).to(dtype)


@pytest.mark.skipif(not IS_HOPPER, reason="the kernel is written for sm_90")
@pytest.mark.parametrize("shape", [SHAPE, TALL])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "size"),
    [(1, 1024, 3072), (129, 256, 8), (700, 2056, 1000), (2048, 1024, 3072), (4097, 2048, 8192)],
)
def test_gated_products(shape, name, num_tokens, hidden, size):
    dtypes = (torch.bfloat16, torch.float16) if name == "silu" else (torch.bfloat16,)
    for dtype in dtypes:
        x, weight = gated_case(num_tokens, hidden, size, dtype)
        whole = torch.full((num_tokens + 256, size), float("nan"), device="cuda", dtype=dtype)
        found = whole[128 : 128 + num_tokens]
        launch(shape, x, weight, found, name)
        twin = getattr(activation, f"{name}_and_mul")
        assert error_of(found, twin(F.linear(x.float(), weight.float()))) < MAX_ERROR
        assert whole[:128].isnan().all() and whole[128 + num_tokens :].isnan().all()


@pytest.mark.skipif(not IS_HOPPER, reason="the kernel is written for sm_90")
def test_gated_products_of_views_in_compiled_code_and_in_graphs():
    """Rows of x apart, any number of tokens, replayed with other values."""
    wide, weight = randn(3000, 2 * 1024), gated_case(1, 1024, 3072)[1]

    def product(x):
        return torch.ops.aiter.gated_linear(x, weight, "silu") + 1

    compiled = torch.compile(product, fullgraph=True, dynamic=True)
    for num_tokens in (40, 513, 2999):
        x = wide[:num_tokens, :1024]
        wanted = activation.silu_and_mul(F.linear(x.float(), weight.float())) + 1
        assert error_of(compiled(x), wanted) < MAX_ERROR
    x = wide[:600, :1024]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x)
    wide.normal_()
    graph.replay()
    assert error_of(found, activation.silu_and_mul(F.linear(x.float(), weight.float())) + 1) < MAX_ERROR
