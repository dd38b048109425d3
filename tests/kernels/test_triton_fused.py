"""Triton's fused passes against the reference: under the interpreter without a device, natively with one."""

import pytest
import torch

from atom.kernels.reference import activation, kv_cache, norm, rotary
from atom.kernels.triton import elementwise
from atom.kernels.triton.rotary_cache import rotate_and_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bf16 is wrong under the interpreter of Triton 3.9; fp16 takes the same code.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = [torch.float32, HALF]
TOLERANCE = {torch.float32: 1e-5, HALF: 1e-2}
BLOCK = 4


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(found, wanted):
    assert found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100, 1024])
def test_norms(dtype, size):
    x, weight = random(5, size, dtype=dtype), random(size, seed=2)
    close(elementwise.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))


def test_a_norm_of_heads_reads_a_view_of_the_projection():
    qkv = random(3, 7, 32)
    weight = random(5, 32, seed=1)
    close(elementwise.rms_norm(qkv[:, :5], weight, 1e-6), norm.rms_norm(qkv[:, :5], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("size", [48, 1500])
def test_gated_activations(dtype, name, size):
    gate_up = 3 * random(4, 2 * size, dtype=dtype)
    close(getattr(elementwise, name)(gate_up), getattr(activation, name)(gate_up))


def test_a_gate_of_a_large_negative_number_is_zero():
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=DEVICE)
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        found = getattr(elementwise, name)(gate_up)
        assert found.isfinite().all() and found[0, 0] == 0.0 and found[0, 1] == 3e4


@pytest.mark.parametrize("function", ["rms_norm", "silu_and_mul"])
def test_no_rows(function):
    x = torch.empty(0, 64, device=DEVICE)
    found = (
        elementwise.rms_norm(x, random(64), 1e-6) if function == "rms_norm" else elementwise.silu_and_mul(x)
    )
    assert len(found) == 0


def rotate_by_reference(qkv, num_heads, num_kv_heads, cos, sin, weight, keys, values, slots):
    """``(q, k, v)`` and the cache as the separate kernels make them."""
    num_turned = num_heads + num_kv_heads
    turned = qkv[:, :num_turned]
    if weight is not None:
        turned = norm.rms_norm(turned, weight, 1e-6)
    turned = rotary.rotary(turned, cos, sin)
    k, v = (t.nan_to_num(0.0, 0.0, 0.0) for t in (turned[:, num_heads:], qkv[:, num_turned:]))
    kv_cache.write_kv(k, v, keys, values, slots)
    return torch.cat((turned[:, :num_heads], k, v), dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_heads, num_kv_heads, dim", [(4, 2, 16), (6, 1, 24), (16, 8, 128)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_rotation_and_cache_write(dtype, has_norm, num_heads, num_kv_heads, dim, tokens):
    num_tokens = 5
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    qkv[1, -1, 3], qkv[2, num_heads, 0], qkv[4, -1, 1] = float("inf"), float("nan"), float("nan")
    cos, sin = (random(num_tokens, 1, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = random(num_heads + num_kv_heads, dim, seed=3) if has_norm else None
    slots = torch.tensor([5, 0, 11, -1, -1], device=DEVICE)
    caches = [[random(3, num_kv_heads, BLOCK, dim, dtype=dtype, seed=s) for s in (4, 5)] for _ in range(2)]
    wanted = rotate_by_reference(qkv, num_heads, num_kv_heads, cos, sin, weight, *caches[1], slots)
    rotate_and_write(qkv, num_heads, cos, sin, weight, 1e-6, *caches[0], slots, tokens_per_program=tokens)
    close(qkv, wanted)
    for found, expected in zip(*caches, strict=True):
        close(found, expected)


def test_stored_keys_are_divided_by_their_scale():
    qkv = random(2, 4, 16)
    cos, sin = torch.ones(2, 1, 16, device=DEVICE), torch.zeros(2, 1, 16, device=DEVICE)
    cache = [torch.zeros(1, 1, BLOCK, 16, device=DEVICE) for _ in range(2)]
    slots = torch.tensor([1, 3], device=DEVICE)
    scales = {"k_scale": torch.tensor([2.0], device=DEVICE), "v_scale": torch.tensor([0.5], device=DEVICE)}
    rotate_and_write(qkv, 2, cos, sin, None, 0.0, *cache, slots, **scales)
    close(cache[0][0, 0, slots], qkv[:, 2] / 2.0)
    close(cache[1][0, 0, slots], qkv[:, 3] / 0.5)


def test_a_narrow_cache_holds_its_largest_number_instead_of_nan():
    # No rounding, in which the interpreter is not exact.
    qkv = random(2, 4, 16).to(torch.float8_e4m3fn).float()
    qkv[0, 2, 1], qkv[1, 3, 9] = 120.0, -1e30
    cos, sin = torch.ones(2, 1, 16, device=DEVICE), torch.zeros(2, 1, 16, device=DEVICE)
    cache = [torch.zeros(1, 1, BLOCK, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.tensor([1, 3], device=DEVICE)
    scale = torch.tensor([0.25], device=DEVICE)
    rotate_and_write(qkv, 2, cos, sin, None, 0.0, *cache, slots, k_scale=scale, v_scale=scale)
    keys, values = (c.float()[0, 0, slots] for c in cache)
    assert keys[0, 1] == 448.0 and values[1, 9] == -448.0
    for found, wanted in ((keys, qkv[:, 2]), (values, qkv[:, 3])):
        assert torch.equal(found, (wanted / 0.25).clamp(-448.0, 448.0))
