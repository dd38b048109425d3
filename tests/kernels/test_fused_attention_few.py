"""The kernel of very few sequences for sm_90 against its plain twin: run by the interpreter, which knows no layouts."""

import pytest
import torch

from atom.kernels.triton import fused_attention_launch
from atom.kernels.triton.fused_attention_launch import (
    AttentionLayer,
    GroupedShape,
    fits_grouped,
    grouped_shape,
)
from tests.helpers.decode_case import DEVICE, Case
from tests.helpers.interpreted_gluon import use_gluon_kernels

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu runs the kernel itself")
LENS = [1, 17, 0, 200, 64, 65]
HALF = torch.float16


@pytest.fixture(autouse=True)
def launches(tmp_path, monkeypatch):
    """The grids that the kernel ran in."""
    use_gluon_kernels(monkeypatch, tmp_path)
    kernels = fused_attention_launch.fused_attention_few_gluon
    kernel, found = kernels.grouped, []

    class Counted:
        def __getitem__(self, grid):
            found.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "grouped", Counted())
    monkeypatch.setattr(fused_attention_launch, "MAX_GROUPED_PROGRAMS", 1000)
    return found


def launch(parts=4, warps=4, ahead=2):
    return {"has_gluon": True, "grouped_shape": GroupedShape(parts, warps, ahead, 128)}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (8, 1)])
def test_groups_of_heads(launches, heads, kv_heads):
    torch.manual_seed(heads)
    Case(LENS, HALF, heads=heads, kv_heads=kv_heads, dim=64, rotary=64).check(launch=launch())
    assert launches == [(kv_heads, 4, len(LENS))]


@pytest.mark.parametrize(("parts", "warps", "ahead"), [(8, 2, 3), (4, 4, 1)])
def test_block_shapes(parts, warps, ahead):
    torch.manual_seed(parts)
    case = Case([130, 33, 5], HALF, heads=4, kv_heads=2, dim=128, rotary=128)
    norm = torch.linspace(0.5, 1.5, 6 * 128).view(6, 128)
    case.check(launch=launch(parts, warps, ahead), qk_norm=norm, rows=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 40},
        {"soft_cap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"scales": (torch.tensor([0.25]), torch.tensor([2.0]))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_families_need(fields):
    torch.manual_seed(2)
    Case(LENS, HALF, heads=4, kv_heads=2, dim=64, rotary=32).check(launch=launch(), **fields)


@pytest.mark.parametrize("fields", [{"sinks": torch.zeros(4)}, {"window": 150}, {"soft_cap": 2.0}])
def test_long_contexts_are_split_over_keys(monkeypatch, fields):
    torch.manual_seed(4)
    monkeypatch.setattr(fused_attention_launch, "LONG", 100)
    Case([300, 64, 129], HALF, heads=4, kv_heads=2, dim=64, rotary=64).check(launch=launch(), **fields)


@pytest.mark.parametrize("longest", [1024, 100], ids=["columns", "split over keys"])
def test_the_best_score_is_found_however_low_all_are(monkeypatch, longest):
    torch.manual_seed(9)
    monkeypatch.setattr(fused_attention_launch, "LONG", longest)
    case = Case(LENS, HALF, heads=4, kv_heads=2, dim=64, rotary=64).lower_scores()
    case.check(launch=launch(parts=2))


def test_a_value_that_is_not_finite_is_stored_as_zero():
    case = Case([20], HALF, heads=2, kv_heads=1, dim=64, rotary=64)
    case.qkv[0, -1] = float("nan")
    case.check(launch=launch())


def test_other_layers_are_left_to_the_portable_kernels(launches):
    layer = AttentionLayer(6, 2, 64, 0.125, 64, 0)
    assert not fits_grouped(layer, HALF, HALF, 16), "three query heads a kv head"
    assert not fits_grouped(AttentionLayer(4, 2, 32, 0.125, 32, 0), HALF, HALF, 16)
    layer = AttentionLayer(4, 2, 64, 0.125, 64, 0)
    assert not fits_grouped(layer, torch.float32, torch.float32, 16)
    assert not fits_grouped(layer, HALF, torch.float8_e4m3fn, 16)
    for heads, dim in ((16, 128), (32, 64), (32, 128)):
        layer = AttentionLayer(heads, 8, dim, 0.125, dim, 0)
        assert fits_grouped(layer, HALF, HALF, 16) and dim // grouped_shape(layer).parts >= 16
    Case([20, 5], torch.float32).check(launch={"has_gluon": True})
    assert launches == []
