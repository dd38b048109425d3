"""Rounding of weights: error bounds, and that the packed formats hold the same values."""

import pytest
import torch

from atom.kernels.cpu.native.library import native_library
from atom.kernels.cpu.native.weights import pack
from atom.model_loader.gguf_dequant import FAST_TYPES
from atom.quantization.quantizers import (
    dequantize,
    fake_quantize,
    quantize_int4,
    quantize_int8,
    to_q8_0,
)
from atom.quantization.spec import CPU_WEIGHTS


@pytest.fixture
def weight():
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[3] = 0  # a row of zeros has no scale
    weight[5, :32] *= 40  # an outlier group
    return weight


def test_int8_is_within_half_a_step(weight):
    q, scale = quantize_int8(weight)
    assert q.dtype is torch.int8 and q.abs().max() == 127
    error = (dequantize(q, scale) - weight).abs()
    assert (error <= scale * 0.5 * 1.0001).all()
    assert not dequantize(q, scale)[3].any()


def test_int8_groups_are_finer_than_rows(weight):
    by_row, by_group = (
        (dequantize(*quantize_int8(weight, size)) - weight).square().sum() for size in (0, 32)
    )
    assert by_group < 0.5 * by_row


def test_int4_beats_the_plain_scale_and_stays_in_range(weight):
    q, scale = quantize_int4(weight)
    assert scale.dtype is torch.bfloat16 and scale.shape == (96, 8)
    assert q.min() >= -8 and q.max() <= 7
    error = (dequantize(q, scale) - weight).view(96, 8, 32)
    assert (error.abs() <= scale.float().abs()[..., None] * 1.51).all()
    groups = weight.view(96, 8, 32)
    step = groups.abs().amax(-1, keepdim=True) / 7
    plain = (groups / step.clamp_min(1e-30)).round() * step - groups
    assert error.square().sum() < 0.95 * plain.square().sum()


def test_group_must_divide():
    with pytest.raises(ValueError, match="in_features must be a multiple of the group of 32, got 40"):
        quantize_int4(torch.zeros(2, 40))


def test_q8_0_blocks_read_back(weight):
    blocks = to_q8_0(weight)
    assert blocks.shape == (96, 256 // 32 * 34)
    values = FAST_TYPES["Q8_0"](blocks.view(-1, 34)).view(96, 256)
    step = weight.view(96, 8, 32).abs().amax(-1, keepdim=True) / 127
    error = (values - weight).view(96, 8, 32).abs()
    assert (error <= step * 0.57 + 1e-9).all()  # half a step, and what the fp16 scale is off by at 127 steps


@pytest.mark.skipif(native_library() is None, reason="no compiler here")
@pytest.mark.parametrize(("name", "bits", "group"), [("int8", 8, 0), ("int8_a8", 8, 0), ("int4", 4, 32)])
def test_packed_weights_hold_the_same_values(weight, name, bits, group):
    packed = pack(weight, name).unpack()
    expected = fake_quantize(weight, bits, group)
    # The C code may break a tie between two candidates, or round a value half-way, to the other side.
    assert (packed != expected).float().mean() < 0.002
    assert (packed - weight).square().sum() <= 1.001 * (expected - weight).square().sum()


def test_layers_with_outliers_keep_wide_activations_where_a_row_has_one_scale():
    assert {name: spec.outlier_op for name, spec in CPU_WEIGHTS.items()} == {
        "bf16": "linear",
        "int8": "linear_int8",
        "int8_a8": "linear_int8",
        "int8_g32": "linear_int8_g32",
        "int4": "linear_int4",
    }
