"""One-token products by tensor cores against their plain twin: run by the interpreter, which knows no layouts."""

import pytest
import torch

from atom.kernels.reference import decode as reference
from atom.kernels.triton import decode_gemv_gluon
from atom.kernels.triton.decode_choices import Choice, LinearShape, candidates, default_choice, fits
from atom.kernels.triton.decode_linear import DecodeLinear, LinearArguments
from atom.kernels.triton.decode_parts import ACTIVATIONS
from tests.helpers.decode_case import DEVICE, close, random
from tests.helpers.interpreted_gluon import interpreted

HALF = torch.float16


@pytest.fixture(autouse=True)
def _interpreted(tmp_path, monkeypatch):
    if DEVICE == "cuda":
        pytest.skip("tests/gpu runs the kernel itself")
    kernels = interpreted(decode_gemv_gluon, tmp_path)
    monkeypatch.setattr("atom.kernels.triton.decode_gemv_gluon", kernels)


@pytest.mark.parametrize(
    ("rows", "columns", "blocks", "activation", "has_norm", "has_bias", "has_residual"),
    [
        (64, 256, (16, 4), None, True, True, False),
        (32, 768, (8, 4), None, True, False, True),  # a warp's share of the columns is no power of two
        (48, 512, (16, 2), "silu", True, True, False),
        (24, 256, (16, 4), "gelu_tanh", False, False, False),
        (32, 384, (8, 2), None, False, False, True),
        (32, 512, (16, 8), None, False, True, True),
    ],
)
def test_equals_its_twin(rows, columns, blocks, activation, has_norm, has_bias, has_residual):
    torch.manual_seed(columns)
    weight_rows = 2 * rows if activation else rows
    layer = LinearArguments(
        random(weight_rows, columns, dtype=HALF, scale=columns**-0.5),
        norm=1 + random(columns, scale=0.2, dtype=HALF) if has_norm else None,
        eps=1e-5,
        bias=random(weight_rows, dtype=HALF) if has_bias else None,
        activation=ACTIVATIONS[activation] if activation else 0,
    )
    assert fits(Choice("mma", blocks), layer.shape, 1)
    x = random(1, columns, dtype=HALF)
    out = random(1, rows, dtype=HALF)
    residual = out if has_residual else None  # in place, as the residual stream is
    wanted = reference.fused_linear(
        x, layer.weight, norm=layer.norm, eps=1e-5, bias=layer.bias, activation=activation,
        residual=out.clone() if has_residual else None,
    )  # fmt: skip
    DecodeLinear(x.device, has_gluon=True)(x, layer, out, residual, choice=Choice("mma", blocks))
    assert close(out, wanted)


def test_shapes_that_are_no_whole_tiles_are_refused():
    assert fits(Choice("mma", (16, 4)), LinearShape(4096, 1024), 1)
    assert fits(Choice("mma", (16, 4)), LinearShape(3072, 1024, 1), 1)
    for blocks, shape in (
        ((16, 4), LinearShape(1000, 1024)),
        ((16, 4), LinearShape(3076, 1024, 1)),
        ((8, 4), LinearShape(3072, 1024, 1)),  # pairs take tiles of 16 rows
        ((4, 4), LinearShape(4096, 1024)),
        ((16, 4), LinearShape(4096, 1000)),
        ((16, 4), LinearShape(4096, 2048)),  # more than a thread holds
    ):
        assert not fits(Choice("mma", blocks), shape, 1), (blocks, shape)
    assert not fits(Choice("mma", (16, 4)), LinearShape(4096, 1024), 8)


def test_the_layers_of_the_smallest_model_take_it():
    for shape in (
        LinearShape(4096, 1024),
        LinearShape(1024, 2048),
        LinearShape(3072, 1024, 1),
        LinearShape(1024, 3072),
    ):
        choice = default_choice(shape, 1, True)
        assert choice.kernel == "mma" and fits(choice, shape, 1)
        assert choice in candidates(shape, 1, True)
        assert default_choice(shape, 1, False).kernel == "gemv"
