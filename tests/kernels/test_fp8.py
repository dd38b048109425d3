"""fp8 rows and products: the reference against a table of all 256 values, Triton against the reference."""

import numpy as np
import pytest
import torch

from atom.kernels.linear import QuantisedRows
from atom.kernels.reference import fp8
from atom.kernels.triton import fp8_linear, fp8_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs sm_89"
)
pytestmark = needs_fp8


@pytest.fixture(autouse=True)
def rounded_by_torch(monkeypatch):
    """The interpreter loses the carry where rounding reaches the next power of two: there, rows come in fp32."""
    if DEVICE == "cpu":
        monkeypatch.setattr(fp8_rows, "FP8", torch.float32)


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def e4m3_values() -> np.ndarray:
    """The 126 positive finite values, by the format's definition: 4 bits of exponent with bias 7, 3 of mantissa."""
    subnormal = [m / 8 * 2.0**-6 for m in range(1, 8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array([0.0, *subnormal, *normal[:-1]])  # the last code is NaN


def nearest(x: np.ndarray) -> np.ndarray:
    """Each value rounded to e4m3, to the even mantissa between two."""
    values = e4m3_values()
    index = np.abs(np.abs(x)[..., None] - values).argmin(-1)  # the lower of two that are as near
    above = np.minimum(index + 1, len(values) - 1)
    is_tie = np.abs(x) - values[index] == values[above] - np.abs(x)
    index = np.where(is_tie & (index % 2 == 1), above, index)
    return np.copysign(values[index], x)


def test_rounding_is_the_formats():
    x = torch.cat([random(6, 300), random(1, 300, seed=1) * 1e-3, torch.zeros(1, 300, device=DEVICE)])
    rows = fp8.round_rows(x)
    scales = np.maximum(np.abs(x.cpu().numpy()).max(-1, keepdims=True), np.float32(1e-12)) / np.float32(448)
    np.testing.assert_allclose(rows.scales.cpu().numpy(), scales, rtol=1e-6)
    wanted = nearest((x / rows.scales).cpu().numpy().astype(np.float64))
    np.testing.assert_array_equal(rows.values.float().cpu().numpy(), wanted)
    assert np.abs(wanted[:-1]).max() == 448 and not wanted[-1].any()


def close(found: QuantisedRows, wanted: QuantisedRows):
    """The same scales, and values that differ by one step of the format at most, seldom."""
    found = QuantisedRows(found.values.to(fp8.FP8), found.scales)
    assert found.scales.shape == (len(found.values), 1)
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-5, atol=0)
    left, right = found.values.float(), wanted.values.float()
    torch.testing.assert_close(left, right, rtol=0.126, atol=2.0**-9)
    assert (left != right).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [64, 100, 1500])
def test_rows_equal_the_reference(dtype, size):
    x, weight = 3 * random(5, size, dtype=dtype), random(size, seed=2)
    gate_up = torch.cat([x, random(5, size, seed=3, dtype=dtype)], dim=1)
    close(fp8_rows.quantise_fp8(x), fp8.quantise_fp8(x))
    close(fp8_rows.quantise_fp8(gate_up[:, :size]), fp8.quantise_fp8(x))
    close(fp8_rows.rms_norm_fp8(x, weight, 1e-5), fp8.rms_norm_fp8(x, weight, 1e-5))
    close(fp8_rows.silu_and_mul_fp8(gate_up), fp8.silu_and_mul_fp8(gate_up))
    close(fp8_rows.gelu_tanh_and_mul_fp8(gate_up), fp8.gelu_tanh_and_mul_fp8(gate_up))


def test_a_row_that_is_not_finite_spoils_no_other():
    x = random(4, 64)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = fp8_rows.quantise_fp8(x)
    products = found.values.float().sum(-1) * found.scales[:, 0]
    assert products.isfinite().tolist() == [True, False, False, True]
    close(QuantisedRows(*(part[::3] for part in found)), fp8.quantise_fp8(x[::3]))


def test_no_rows():
    assert fp8_rows.quantise_fp8(random(0, 64)).values.shape == (0, 64)
    weight = fp8.Fp8Linear().pack(random(32, 64, dtype=torch.bfloat16))
    rows = fp8.quantise_fp8(random(0, 64))
    assert fp8_linear.fp8_product(*rows, weight.values, weight.scales, None).shape == (0, 32)


@pytest.mark.parametrize("num_tokens", [1, 64, 70])
@pytest.mark.parametrize("size", [(48, 512), (80, 208)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_the_reference(num_tokens, size, has_bias):
    linear = fp8.Fp8Linear()
    packed = linear.pack(random(*size, seed=1, dtype=torch.bfloat16))
    x = random(num_tokens, size[1], dtype=torch.bfloat16)
    rows = fp8.quantise_fp8(x)
    bias = random(size[0], seed=4, dtype=torch.bfloat16) if has_bias else None
    wanted = linear(x, packed, bias)
    assert wanted.dtype is torch.bfloat16
    found = fp8_linear.fp8_product(*rows, packed.values, packed.scales, bias)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(linear(rows, packed, bias), wanted, rtol=0, atol=0)
    total = random(num_tokens, size[0], seed=5, dtype=torch.bfloat16)
    summed = total.clone()
    fp8_linear.add_fp8_product(summed, *rows, packed.values, packed.scales, bias)
    torch.testing.assert_close(summed.float(), total.float() + wanted.float(), rtol=2e-2, atol=4e-2)


def test_a_packed_weight_is_off_by_half_a_step():
    weight = random(64, 256)
    packed = fp8.Fp8Linear().pack(weight)
    found = packed.values.float() * packed.scales
    error = (found - weight).abs() / weight.abs().amax(-1, keepdim=True)
    assert error.max() <= 1 / 28 + 1e-6 and packed.values.nbytes + packed.scales.nbytes == 64 * (256 + 4)
