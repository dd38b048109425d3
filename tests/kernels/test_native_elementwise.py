"""The native norms, rotation with the cache write, and gated activations against their reference twins."""

import pytest
import torch

from atom.kernels.cpu.native.arguments import (
    GELU_TANH_MUL,
    SILU_MUL,
    GatedArguments,
    NormArguments,
    RopeArguments,
    RotationArguments,
)
from atom.kernels.cpu.native.library import native_library, pointer
from atom.kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
from atom.kernels.reference.norm import rms_norm
from atom.kernels.reference.rotary import rotary

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="no C compiler")
CLOSE = dict(rtol=3e-6, atol=3e-6)  # fp32: other orders of sums, an exponential of 1e-7


@pytest.mark.parametrize(("m", "size"), [(1, 640), (3, 64), (70, 1000), (5, 7), (33, 4096)])
@pytest.mark.parametrize("kind", ["norm", "add", "add normed"])
def test_add_rms_norm(m, size, kind):
    x, delta, weight, delta_norm = (torch.randn(*s) for s in ((m, size), (m, size), (size,), (size,)))
    out, residual, eps = torch.empty(m, size), x.clone(), 1e-6
    total = {"norm": x, "add": x + delta, "add normed": x + rms_norm(delta, delta_norm, eps)}[kind]
    library.call(
        "atom_add_rms_norm",
        NormArguments(
            residual=pointer(residual),
            delta=None if kind == "norm" else pointer(delta),
            delta_norm=pointer(delta_norm) if kind == "add normed" else None,
            weight=pointer(weight),
            out=pointer(out),
            m=m,
            size=size,
            eps=eps,
        ),
    )
    torch.testing.assert_close(residual, total, **CLOSE)
    torch.testing.assert_close(out, rms_norm(total, weight, eps), **CLOSE)


def test_norm_of_rows_without_a_residual():
    x, weight, out = torch.randn(9, 48), torch.randn(48), torch.empty(9, 48)
    library.call(
        "atom_add_rms_norm",
        NormArguments(delta=pointer(x), weight=pointer(weight), out=pointer(out), m=9, size=48, eps=1e-5),
    )
    torch.testing.assert_close(out, rms_norm(x, weight, 1e-5), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "block_size"), [(256, 256, 16), (80, 32, 8), (64, 20, 5)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rope_and_cache(dtype, head_dim, rotary_dim, block_size, has_norm):
    m, heads, kv_heads, eps = 37, 6, 2, 1e-6
    qkv = torch.randn(m, (heads + 2 * kv_heads) * head_dim + 5)
    qkv[3, heads * head_dim + 1] = torch.inf  # a key that is not finite
    norms = torch.randn(heads + kv_heads, head_dim) if has_norm else None
    angles = torch.rand(m, rotary_dim // 2) * 7
    cos, sin = angles.cos(), angles.sin()
    keys = torch.zeros(20, kv_heads, block_size, head_dim, dtype=dtype)
    values = torch.zeros_like(keys)
    slots = torch.randperm(20 * block_size)[:m]
    slots[[2, 11]] = -1

    rows = qkv[:, : (heads + 2 * kv_heads) * head_dim].reshape(m, -1, head_dim).clone()
    turned = rows[:, : heads + kv_heads]
    if has_norm:
        turned = rms_norm(turned, norms, eps)
    both = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    turned = rotary(turned, *both)
    expected_cache = []
    for part in (turned[:, heads:], rows[:, heads + kv_heads :]):
        cache = torch.zeros_like(keys)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                finite = part[token].nan_to_num(0.0, 0.0, 0.0).to(dtype)
                cache[slot // block_size, :, slot % block_size] = finite
        expected_cache.append(cache)

    library.call(
        "atom_rope_and_cache",
        RopeArguments(
            qkv=pointer(qkv),
            ld=qkv.stride(0),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            qk_weight=pointer(norms),
            eps=eps,
            cos=pointer(cos),
            sin=pointer(sin),
            keys=pointer(keys),
            values=pointer(values),
            cache_is_bf16=dtype is torch.bfloat16,
            block_size=block_size,
            slots=pointer(slots),
            m=m,
        ),
    )
    out = qkv[:, : (heads + 2 * kv_heads) * head_dim].reshape(m, -1, head_dim)
    torch.testing.assert_close(out[:, : heads + kv_heads], turned, **CLOSE, equal_nan=True)
    assert torch.equal(out[:, heads + kv_heads :], rows[:, heads + kv_heads :])
    rounding = (
        dict(rtol=8e-3, atol=1e-5) if dtype is torch.bfloat16 else CLOSE
    )  # one bf16 step where fp32 differs
    torch.testing.assert_close(keys, expected_cache[0], **rounding)
    assert torch.equal(values, expected_cache[1])


def test_rotation():
    positions = torch.tensor([0, 1, 77, 4095, 131_071, 1_000_000])
    inv_freq = 1e4 ** -(torch.arange(0, 96, 2) / 96)
    cos, sin = torch.empty(6, 48), torch.empty(6, 48)
    arguments = RotationArguments(
        positions=pointer(positions),
        m=6,
        inv_freq=pointer(inv_freq),
        half=48,
        factor=1.25,
        cos=pointer(cos),
        sin=pointer(sin),
    )
    library.call("atom_rotation_rows", arguments)
    angles = (positions.float()[:, None] * inv_freq).double()
    torch.testing.assert_close(cos, (angles.cos() * 1.25).float(), rtol=0, atol=2e-7)
    torch.testing.assert_close(sin, (angles.sin() * 1.25).float(), rtol=0, atol=2e-7)


@pytest.mark.parametrize(("m", "n"), [(1, 640), (5, 64), (3, 50), (40, 9000)])
@pytest.mark.parametrize(
    ("activation", "twin"), [(SILU_MUL, silu_and_mul), (GELU_TANH_MUL, gelu_tanh_and_mul)]
)
def test_gated_activation(m, n, activation, twin):
    x, y = torch.randn(m, 2 * n) * 4, torch.full((m, n + 3), 7.0)
    x[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -0.0])
    arguments = GatedArguments(
        x=pointer(x), ldx=2 * n, y=pointer(y), ldy=n + 3, m=m, n=n, activation=activation
    )
    library.call("atom_gated_activation", arguments)
    torch.testing.assert_close(y[:, :n], twin(x), rtol=3e-6, atol=3e-6)
    assert (y[:, n:] == 7.0).all()
