"""Each CPU implementation against the reference."""

import pytest
import torch

from atom.kernels.cpu import elementwise
from atom.kernels.cpu import linear as cpu_linear
from atom.kernels.cpu.attention import decode_attention, prefill_attention
from atom.kernels.reference import activation, norm, rotary
from atom.kernels.reference.attention import attend
from atom.kernels.reference.linear import Int8Linear, quantize_rows_int8
from atom.kernels.registry import select_kernel

DTYPES = [torch.float32, torch.bfloat16]


def close(found, wanted, dtype):
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), wanted.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype):
    x = torch.randn(5, 6, 48, dtype=dtype)[:, :4]  # a slice, as query heads of a packed product are
    weight = torch.rand(4, 48) + 0.5
    close(elementwise.rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6), dtype)


def test_rms_norm_of_zeros_is_zero():
    zeros = torch.zeros(2, 8)
    assert torch.equal(elementwise.rms_norm(zeros, torch.ones(8), 1e-6), zeros)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary(dtype, rotary_dim):
    x = torch.randn(7, 3, 16, dtype=dtype)
    angle = torch.rand(7, 1, rotary_dim // 2) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    found = elementwise.rotary(x, cos, sin)
    close(found, rotary.rotary(x, cos, sin), dtype)
    half = rotary_dim // 2  # the definition, pair by pair
    wanted = x[..., 0] * cos[..., 0] - x[..., half] * cos.new_tensor(1) * sin[..., half]
    close(found[..., 0], wanted, dtype)
    assert torch.equal(found[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_activations(dtype, name):
    x = torch.randn(9, 64, dtype=dtype) * 3
    before = x.clone()
    close(getattr(elementwise, name)(x), getattr(activation, name)(x), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("has_slow_bf16", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 16, 200])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_linear(monkeypatch, has_slow_bf16, num_tokens, has_bias):
    if not cpu_linear._has_packed_linear():
        pytest.skip("this CPU or torch build has no packed bf16 product")
    kernel = cpu_linear.OneDnnLinear()
    monkeypatch.setattr(kernel, "has_slow_bf16", has_slow_bf16)
    weight = torch.randn(96, 40).bfloat16()
    bias = torch.randn(96).bfloat16() if has_bias else None
    x = torch.randn(num_tokens, 40).bfloat16()
    wanted = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    found = kernel(x, kernel.pack(weight), bias)
    assert found.dtype is torch.bfloat16
    close(found, wanted, torch.bfloat16)


def test_int8_rows_and_products():
    torch.manual_seed(0)
    weight = torch.randn(300, 64) * torch.logspace(-3, 2, 300)[:, None]
    weight[7] = 0
    values, scales = quantize_rows_int8(weight)
    assert values.dtype is torch.int8 and int(values.min()) >= -127
    error = (values.float() * scales[:, None] - weight).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())
    x = torch.randn(5, 64)
    reference = Int8Linear()(x, (values, scales), None)
    torch.testing.assert_close(reference, x @ (values.float() * scales[:, None]).t(), rtol=1e-5, atol=1e-4)
    fast = cpu_linear.IntMmLinear()(x, (values, scales), None)
    relative = (fast - reference).norm(dim=0) / reference.norm(dim=0).clamp(min=1e-9)
    assert relative.max() < 0.05  # rounding x to int8: about 0.5 % of its largest value


def test_the_cpu_chooses_its_own_implementations():
    assert select_kernel("rms_norm", device=torch.device("cpu")) is elementwise.rms_norm


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"window": 300}, {"soft_cap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize(("query_len", "context_len"), [(1, 1), (7, 7), (300, 300), (150, 400), (1, 33)])
def test_prefill_attention(options, query_len, context_len):
    options = dict(options)
    torch.manual_seed(query_len)
    q = torch.randn(query_len, 6, 16)
    k, v = torch.randn(context_len, 2, 16), torch.randn(context_len, 2, 16)
    if options.pop("sinks", None):
        options["sinks"] = torch.randn(6)
    wanted = attend(q, k, v, scale=0.3, **options)
    first_query = context_len - query_len
    window = options.get("window")
    first_key = 0 if window is None else max(0, first_query - window + 1)
    k, v = (x[first_key:].transpose(0, 1) for x in (k, v))
    found = prefill_attention(q, k, v, first_key=first_key, first_query=first_query, scale=0.3, **options)
    close(found, wanted, torch.float32)


def test_decode_attention_without_a_fused_path_equals_the_fused_one():
    q, k, v = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 9, 16), torch.randn(3, 2, 9, 16)
    mask = torch.zeros(3, 1, 1, 9)
    mask[1, ..., 5:] = -1e30
    fused = decode_attention(q, k, v, mask, scale=0.2)
    # A cap and sinks too weak to change anything.
    capped = decode_attention(q, k, v, mask, scale=0.2, soft_cap=1e4)
    sunk = decode_attention(q, k, v, mask, scale=0.2, sinks=torch.full((2, 4), -1e4))
    torch.testing.assert_close(capped, fused, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sunk, fused, rtol=1e-4, atol=1e-5)
